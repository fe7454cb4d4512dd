"""`burstline bench restore --device cuda`: an entry comes back from host memory, checksums and all, against the bare copy.

What is timed is what a client waits for: from `submit` to the first token of a prompt whose state and rows are all in the
host tier. The floor is the bytes over the rate of a pinned copy in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

from services.bench.card import Ceilings
from services.bench.card_prefill import ROOT, Asker
from services.gpu_worker.engine.models.loader import LoadedModel
from shared.errors import EngineFault
from shared.evidence import Bar
from shared.protocol.chain import chain

TOKENS: Final = 30_016
"""On the grid."""
LIMIT: Final = 1.5
REPEATS: Final = 3


def run_card_restore(
    loaded: LoadedModel,
    ceilings: Ceilings,
    *,
    chunk: int,
    host_bytes: int,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Prime one prompt, spill its entry, ask again; a few times."""
    asker = Asker(loaded, TOKENS, chunk, room=2, host_bytes=host_bytes)
    asker.ask(asker.prompt(512))
    prompt = asker.prompt(TOKENS)
    cold, _ = asker.ask(prompt)
    keys = chain(ROOT, prompt)
    times, spilled = [], []
    for _ in range(REPEATS):
        asker.engine.spill(keys)
        size = asker.engine.stats().host_bytes
        seconds, cached = asker.ask(prompt)
        if cached != TOKENS:
            raise EngineFault(f"{cached} of {TOKENS} tokens came back from the host")
        times.append(seconds)
        spilled.append(size)
        report(f"restored {size / 2**30:.2f} GiB in {seconds * 1e3:.1f} ms")
    copy = spilled[-1] / ceilings.host_to_card_bytes_per_s
    return {
        "tokens": TOKENS,
        "bytes": spilled[-1],
        "cold_s": round(cold, 3),
        "to_first_token_s": round(statistics.median(times), 4),
        "copy_s": round(copy, 4),
        "over_copy": round(statistics.median(times) / copy, 3),
        "mismatches": asker.engine.stats().mismatches,
    }


def bars(results: dict[str, Any]) -> list[Bar]:
    """The promises for the 27B shape."""
    return [
        Bar.at_most("restore of 30,016 tokens over the copy", results["over_copy"], LIMIT, "x"),
        Bar.zero("checksums that did not match", results["mismatches"], "copies"),
    ]
