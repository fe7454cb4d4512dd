"""Layers against plain torch; mirrors the modules of `engine.layers`."""
