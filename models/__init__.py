"""Models that ship with Burstline: data folders in Hugging Face form, each with the recipe that made it."""
