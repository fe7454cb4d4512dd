"""`burstline prove`: choose cells, run them, tell."""

from __future__ import annotations

import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Final

from rich.console import Console

from services.prove.cover import full, quick
from services.prove.device import Device, choose
from services.prove.evidence import evidence
from services.prove.public import absence
from services.prove.shards import LEAST_CELLS, cut, run
from shared.clock import SYSTEM
from shared.errors import BurstlineError
from shared.evidence import told, write

QUICK_SHARDS: Final = 2
FULL_SHARDS: Final = 6
"""Of even cost, so that two or three processors are busy to the end."""
CARD_QUICK_SHARDS: Final = 6
CARD_FULL_SHARDS: Final = 15
"""On a card the host's calls take the time, in every process for itself, and such a machine has processors enough."""
CARD_LEAST_CELLS: Final = 20


def main(
    *,
    everything: bool,
    seed: int,
    json_file: Path | None,
    device: str = "cpu",
    dtype: str | None = None,
) -> int:
    """Returns 0 when every bar holds, 1 when one does not, 2 when it could not measure."""
    choose(Device(device, dtype))
    console, began = Console(), SYSTEM.monotonic_ns()
    try:
        cells = full(seed) if everything else quick(seed)
        tally = run(cut(cells, everything=everything, seed=seed, **_parts(everything, device)))
    except (BurstlineError, OSError, BrokenProcessPool) as fault:
        sys.stderr.write(f"burstline: prove could not measure: {fault}\n")
        return 2
    if everything and absence():
        console.print(f"No public model was tried: {absence()}")
    seconds = (SYSTEM.monotonic_ns() - began) / 1e9
    console.print(tally.table())
    for difference in tally.told:
        console.print(str(difference), style="red", markup=False, highlight=False)
    bars = tally.bars()
    console.print(
        f"{tally.cells:,} cells, {tally.trials} trials of families, {tally.compared.total():,} comparisons, "
        f"{tally.differences} differences, {tally.accepted:,} accepted and {tally.rejected:,} rejected drafts, {seconds:.0f} s",
        soft_wrap=True,
    )
    for line in told(bars):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        name = f"prove --{'full' if everything else 'quick'} --seed {seed}"
        name += "" if device == "cpu" else f" --device {device} --dtype {dtype or 'bfloat16'}"
        write(json_file, evidence(name, {**tally.results(), "seconds": round(seconds, 1)}, bars))
    return 0 if all(bar.holds for bar in bars) else 1


def _parts(everything: bool, device: str) -> dict[str, int]:
    """How many shards, and how few cells one may have."""
    if device == "cpu":
        return {"most": FULL_SHARDS if everything else QUICK_SHARDS, "least": LEAST_CELLS}
    return {"most": CARD_FULL_SHARDS if everything else CARD_QUICK_SHARDS, "least": CARD_LEAST_CELLS}
