"""How the pocket model and its drafters were made.

- text: `corpus` (pages of documentation), `dialogues` from `facts`, `tools`, `wordings`, `phrases`; `tokenizer`
- shards: `data` (pages and dialogues), `own` (what the trunk itself writes), `batches` (rows of a step)
- models: `layers`, `model` (trunk and MTP head), `block` (block drafter), `weights` (files)
- training: `stages` (what, on what, how long), `train` (the stages' losses), `block_loss`, `loop`
- figures: `heldout` (prompts), `decode` (streams), `evaluate` (the model), `compare` (the drafters)

Run from the repository root, `python -m models.pocket.recipe.<module>`; MODEL_CARD.md lists the commands in order.
No service imports it; `burstline bench spec` does, for drafters without a cache. Intermediate files
live in `recipe/.work/`, which git ignores.
"""
