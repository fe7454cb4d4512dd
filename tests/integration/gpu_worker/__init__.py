"""The worker on the real queue and the real engine."""
