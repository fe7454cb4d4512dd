"""Unit tests of the services, by service."""
