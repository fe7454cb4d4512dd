"""The wire: messages, codec, subjects, chain keys, streams."""
