"""Panics of libraries in Rust. Their class, of pyo3, cannot be imported, and derives from BaseException, so that no handler of
exceptions sees them."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust did not foresee what it met: a fault of what it was given, as far as we can tell."""
    return type(error).__name__ == "PanicException"
