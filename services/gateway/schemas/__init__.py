"""What callers may send, field by field. Strict: no coercion, and a field that is not named here is refused by name."""
