"""What every tier of tests shares stands here: kits, models, waiting. CONTRIBUTING.md says which tier needs what."""
