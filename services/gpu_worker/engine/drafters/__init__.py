"""Drafters: what proposes tokens for a round. A drafter never changes a stream, only how fast it comes.

base         what every drafter is asked                 propose    asks drafters of every kind at once
mtp          chains of the model's own head              ngram      what followed last time after the same tokens
block        several from one pass over masks            ladder     as many as the last round was right, and one
medley       which of several proposes next
replay       the journal of an earlier attempt           gate       how many drafts pay, and whether any do
"""
