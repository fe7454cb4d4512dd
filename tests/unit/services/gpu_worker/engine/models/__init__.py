"""Families against transformers and against slow torch (`plain_latent`, `plain_mtp`); mirrors the modules of `engine.models`."""
