"""Bytes and plans that may change only on purpose: `make golden` writes them anew, the diff is reviewed."""
