"""Benchmarks with the model that ships."""
