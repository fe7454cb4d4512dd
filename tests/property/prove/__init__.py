"""The proof itself under test: it must find faults that are put into the engine."""
