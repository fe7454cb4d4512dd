"""Sessions: a sequence, its drafter and its sampling history, advanced in rounds of draft, verify and accept."""
