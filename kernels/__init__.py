"""One folder an operation: `reference.py` is its definition in torch; the package dispatches by device.

dispatch   twin or device kernel             tiles      constants that order additions
launch     what all launchers check          grouping   rows sorted by expert or adapter
testing, gate   row-exactness, of twins and on a card        tune   times of tiles, on a card
"""
