"""The broker against a model of it, with the ledger's equation after every step."""
