"""The wire: messages, their bytes, their subjects, and the pure state machine of a token stream.

Versioned and frozen. A change of a message is a new version and a golden file (docs/adr/0004); docs/protocol.md tells it.

    messages   every field        subjects   every name and limit     seeds    one seed a choice
    codec      bytes              stream     the reader's side        chain    namespaces and chain keys
                                  news       what that asks and tells
"""
