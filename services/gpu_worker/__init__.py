"""The worker: pulls requests from the queue and runs them on the engine."""
