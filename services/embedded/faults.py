"""What can keep the embedded stack from starting, said so that the reader can mend it."""

from __future__ import annotations

from shared.errors import BurstlineError


class EmbeddedFault(BurstlineError):
    """The stack cannot start or go on. The message says what to do; it is printed as it is."""

    code = "embedded_fault"


class Cancelled(EmbeddedFault):
    """A signal asked to stop while something was starting."""

    code = "cancelled"


class PortTaken(EmbeddedFault):
    """A server could not bind its port."""

    code = "port_taken"
