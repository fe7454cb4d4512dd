"""The engine's memory: KV blocks, recurrent states, and the prefix tree over both. README.md: each module, the invariants."""
