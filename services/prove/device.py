"""Where a run's models are computed: chosen once a process, before the first of them is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from services.gpu_worker.engine.placement import Placement, place


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its name and the type of the weights there; None is the device's own."""

    name: str = "cpu"
    dtype: str | None = None

    @property
    def is_card(self) -> bool:
        return self.name != "cpu"

    def placement(self) -> Placement:
        """Raises EngineFault when the device is not there or does not know the type."""
        return place(self.name, self.dtype)


_chosen = Device()


def choose(device: Device) -> None:
    """From here on this process loads there. What it has already loaded stays where it is."""
    global _chosen
    _chosen = device


def chosen() -> Device:
    return _chosen
