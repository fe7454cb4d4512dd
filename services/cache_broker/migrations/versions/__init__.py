"""One migration a file, oldest first by its number."""
