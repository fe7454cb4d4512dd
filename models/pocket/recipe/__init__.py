"""How the pocket model was made: corpus, dialogues, tokenizer, training stages, evaluation.

Run from the repository root, `python -m models.pocket.recipe.<module>`; MODEL_CARD.md lists the commands in order.
Nothing here is imported by a service. Intermediate files live in `recipe/.work/`, which git ignores.
"""
