"""Mirrors the source folder of the same path."""
