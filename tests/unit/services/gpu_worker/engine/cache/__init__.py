"""Pools, tree, tiers and their owner; mirrors the modules of `engine.cache`."""
