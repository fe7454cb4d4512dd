"""Tests against real NATS and Postgres."""
