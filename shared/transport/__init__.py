"""The seam to the queue: one Protocol (`base`), NATS (`nats`, the only importer of nats-py) and memory (`memory`).

Both implementations pass the same suite, tests/contract/test_transport.py.
"""
