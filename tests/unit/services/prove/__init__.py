"""Unit tests of services/prove."""
