"""The broker against a real Postgres."""
