"""Tests of the models that ship."""
