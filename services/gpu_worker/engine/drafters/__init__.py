"""Drafters: what proposes tokens for a round. A drafter never changes a stream, only how fast it comes."""
