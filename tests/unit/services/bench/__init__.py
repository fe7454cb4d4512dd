"""Unit tests of services/bench."""
