"""The worker with a memory transport and a scripted engine. `rig` makes one, `scripted` and `doubles` are its company."""
