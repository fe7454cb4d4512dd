"""The broker's parts that need no database."""
