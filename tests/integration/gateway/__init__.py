"""The gateway over real sockets, with a scripted broker and worker behind it."""
