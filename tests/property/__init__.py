"""Tests of property."""
