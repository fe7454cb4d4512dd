"""Kernels against their definitions and the row-exactness gate."""
