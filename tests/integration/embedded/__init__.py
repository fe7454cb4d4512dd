"""The embedded servers and the stack: kills, restarts, ports, folders."""
