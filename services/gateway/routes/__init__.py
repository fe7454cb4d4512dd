"""The HTTP surface: one module a group of paths."""
