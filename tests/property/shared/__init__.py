"""Properties of the protocol and of token streams, for whatever hypothesis thinks of."""
