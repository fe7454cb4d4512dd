"""Suites that every implementation of a seam passes: the real one and its twin."""
