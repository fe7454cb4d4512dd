"""Shared modules against real servers and processes."""
