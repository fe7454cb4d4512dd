"""Properties of the worker's state."""
