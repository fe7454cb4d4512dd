"""The engine with small random models, step by step; mirrors its modules."""
