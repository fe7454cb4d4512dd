"""The engine: one thread that owns the device and turns requests into rows, and rows into tokens."""
