"""Properties of the gateway's text path."""
