"""The gate: every operation keeps the bits of a row."""
