"""Unit tests of services/embedded."""
