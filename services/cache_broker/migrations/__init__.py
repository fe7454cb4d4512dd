"""Alembic's scripts, run by `migrate.py` at the start of the broker. `versions/` holds one file a step.

A step must let the previous build go on working (add, fill, switch, and remove one release later): brokers of two
builds run side by side during a deployment.
"""
