"""Every drafter on every family of models, greedy and sampled: drafts decide how fast a stream comes, never what it says
(C1.4).

A trial is one engine and one way to draft. Requests of several rules run together in it, cold, and then again from what
the cache kept. Each is compared with the same request alone, cold and without a drafter. That the way was tried at all is
compared as well: drafts were made, and the second run found its prompts cached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest
from services.prove.axes import DRAFTERS
from services.prove.compare import Verdict, judge_trial
from services.prove.driver import Driver, Record, WatchedEngine
from services.prove.models import EVERY, HAS, with_block
from services.prove.prompts import prompt
from services.prove.rules import RULES, TOP
from services.prove.small import ALONE, drafting, pools
from services.prove.trial import Trial
from shared.protocol.chain import chain

ROOT: Final = b"\x53" * 32
SAID: Final = 24
CAST: Final = (
    ("repeated text", "greedy, logprobs", 100),
    ("on the grid", "sampled", 130),
    ("tool call", "few ids", 71),
    ("unicode", "sampled, truncated", 66),
)
"""(prompt, rule, how much of the prompt is asked)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Chunks and bursts of a trial."""

    chunk: int
    rounds: int

    def __str__(self) -> str:
        return f"chunk {self.chunk}, {self.rounds} rounds"


QUICK: Final = ("mtp K=3", "n-gram K=7", "block K=7")

PACES: Final = (Pace(chunk=128, rounds=7), Pace(chunk=64, rounds=1))


def family(everything: bool, seed: int) -> list[Trial]:
    """See `families.Family`. Nothing is drawn, so the seed says nothing."""
    ways = [name for name, way in DRAFTERS.items() if way.k] if everything else QUICK
    return [
        _trial(model, drafter, pace)
        for model in EVERY
        for drafter in ways
        if DRAFTERS[drafter].kind in HAS[model]
        for pace in (PACES if everything else PACES[:1])
    ]


def tried(model: str, drafter: str, pace: Pace) -> Verdict:
    """Run the cast twice in one engine and compare."""
    verdict, plain = Verdict(), reference(model)
    loaded = with_block(model) if DRAFTERS[drafter].kind in ("block", "auto") else EVERY[model]()
    driver = Driver(_engine(loaded, len(CAST), pace))
    for turn in ("cold", "again"):
        requests = [_request(turn, number, drafter, scored=turn == "cold") for number in range(len(CAST))]
        driver.run(requests)
        records = [driver.records[request.key] for request in requests]
        name = f"{turn}: {model} / {drafter} / {pace}"
        for number, (expected, got) in enumerate(zip(plain, records, strict=True)):
            verdict.add(
                judge_trial(
                    f"{CAST[number][1]}, {name}",
                    expected,
                    got,
                    cached_tokens=got.cached_tokens,
                    logprobs=got.logprobs is not None,
                )
            )
        kept = sum(record.cached_tokens > 0 for record in records)
        verdict.require("prompts found cached", kept if turn == "again" else len(CAST), len(CAST), name)
        drafted = sum(record.end.telemetry.drafted for record in records)
        verdict.require("drafts", min(drafted, 1), 1, name)
    driver.clear()
    return verdict


@cache
def reference(model: str) -> tuple[Record, ...]:
    """Every request of the cast alone, cold, without a drafter, in the smallest chunks. Made once a process."""
    records = []
    for number in range(len(CAST)):
        driver = Driver(_engine(EVERY[model](), 1, PACES[-1], ALONE))
        request = replace(_request("plain", number, "none"), use_cache=False, top_logprobs=TOP)
        driver.run([request])
        records.append(driver.records[request.key])
    return tuple(records)


def _trial(model: str, drafter: str, pace: Pace) -> Trial:
    return Trial(
        name=f"{model} / {drafter} / {pace}",
        run=lambda: tried(model, drafter, pace),
        shares=f"{model}, {pace}",
    )


def _request(name: str, number: int, drafter: str, *, scored: bool = False) -> GenerateRequest:
    """`scored`: with log probabilities, if the rule has them. Without, a card may pick by itself."""
    asked, rule, length = CAST[number]
    tokens = prompt(asked)[:length]
    return GenerateRequest(
        request_id=f"{name}/{number}",
        root=ROOT,
        tokens=tokens,
        chain=chain(ROOT, tokens),
        sampling=RULES[rule].sampling,
        max_tokens=SAID,
        top_logprobs=TOP if scored and RULES[rule].logprobs else None,
        **DRAFTERS[drafter].fields(),
    )


def _engine(
    loaded: LoadedModel, together: int, pace: Pace, limits: EngineLimits | None = None
) -> WatchedEngine:
    rows = max(length for *_, length in CAST) + SAID
    config = pools(streams=together, rows=rows, chunk=pace.chunk, snapshots=2 * len(CAST))
    return WatchedEngine(config, loaded, limits=limits or drafting(pace.rounds))
