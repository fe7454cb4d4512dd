"""Tests of property/engine."""
