"""One folder an operation: `reference.py` is its definition in torch; the package dispatches by device."""
