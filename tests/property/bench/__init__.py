"""The soak of `burstline bench` over many seeds."""
