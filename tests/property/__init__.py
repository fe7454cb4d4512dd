"""Laws with hypothesis: state machines and random walks against a model, for everything that has state."""
