"""Tests of the gateway, with a memory transport, and a broker and a worker that follow a script."""
