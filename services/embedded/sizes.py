"""How many processes a stack has of each service, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass

from services.embedded.commands import numbered


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many processes of each service; every one at least 1."""

    gateways: int = 1
    workers: int = 1
    brokers: int = 1

    def names(self, service: str) -> tuple[str, ...]:
        """What the processes of a service are called."""
        counts = {"gateway": self.gateways, "worker": self.workers, "broker": self.brokers}
        return tuple(numbered(service, number) for number in range(1, counts[service] + 1))
