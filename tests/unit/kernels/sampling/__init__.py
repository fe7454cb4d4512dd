"""Philox and Gumbel noise."""
