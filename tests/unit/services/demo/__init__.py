"""Unit tests of services/demo."""
