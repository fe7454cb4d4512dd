"""The evidence of a benchmark on a card, written as it grows: a run that is cut off leaves every row that it came to.

`complete` in the file says whether the run came to its end. Bars are promises of one shape in one type: only a run of the
whole 27B shape with its weights in bfloat16 is held to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from services.prove.evidence import card as card_device
from shared.evidence import Bar, evidence, told, write

PROMISED_SHAPE: Final = "27b"
PROMISED_RECIPE: Final = "card"

Row = Callable[[str, Mapping[str, Any]], None]
"""Takes a row's name and its figures when they are there."""


def ignored(_name: str, _figures: Mapping[str, Any]) -> None:
    """For runs whose rows nobody watches."""


class Record:
    """What a run of `command` found so far. With a `file` every change of it is on the disk, whole or not at all."""

    def __init__(
        self,
        command: str,
        file: Path | None,
        results: Mapping[str, Any],
        *,
        promised: bool,
        device: Callable[[], Mapping[str, Any]] = card_device,
    ) -> None:
        """`promised`: whether this run is one that the bars are about."""
        self.results: dict[str, Any] = dict(results)
        self.bars: list[Bar] = []
        self._command = command
        self._file = file
        self._promised = promised
        self._device = device

    def add(self, name: str, figures: object) -> None:
        """One figure, or a section that is whole already."""
        self.results[name] = figures
        self._write(complete=False)

    def rows(self, section: str) -> Row:
        """What keeps and tells the rows of a section one by one."""
        rows: dict[str, Any] = self.results.setdefault(section, {})

        def keep(name: str, figures: Mapping[str, Any]) -> None:
            rows[name] = figures
            sys.stderr.write(f"{section}: {name}: {dict(figures)}\n")
            self._write(complete=False)

        return keep

    def hold(self, bars: Sequence[Bar]) -> None:
        """Bars of what was found, where the run is one that they are about."""
        if self._promised:
            self.bars += bars
            self._write(complete=False)

    def end(self) -> bool:
        """Tells the bars, closes the file; whether all of them hold."""
        sys.stdout.write("".join(f"{line}\n" for line in told(self.bars)))
        self._write(complete=True)
        return all(bar.holds for bar in self.bars)

    def _write(self, *, complete: bool) -> None:
        if self._file is not None:
            found = evidence(self._command, self.results, self.bars, device=self._device())
            beside = self._file.with_suffix(".new")
            write(beside, {**found, "complete": complete})
            beside.replace(self._file)
