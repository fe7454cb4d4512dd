"""What drafters propose, and when they are worth it; mirrors the modules of `engine.drafters`."""
