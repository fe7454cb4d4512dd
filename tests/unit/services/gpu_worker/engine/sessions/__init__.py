"""Sessions without an engine around them; mirrors the modules of `engine.sessions`."""
