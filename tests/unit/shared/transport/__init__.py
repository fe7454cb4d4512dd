"""Parts of the transport that need no server."""
