"""The table of what may vary. A cell is one value of every axis; a new value is one entry here.

Behaviour that needs more than a number is a function of the `Scene`: a *plant* prepares the prefix cache and says how many
tokens the cell must find cached; a *way* changes the request or disturbs the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from services.gpu_worker.engine.limits import EngineLimits, SpecGate
from services.gpu_worker.engine.requests import DrafterKind
from services.prove import plants, ways
from services.prove.models import MODELS
from services.prove.prompts import PROMPTS
from services.prove.rules import RULES
from services.prove.scene import Scene


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One way to run one request; every field is a value of the axis of its name."""

    model: str
    prompt: str
    rule: str
    budget: str
    drafter: str
    burst: str
    company: str
    cache: str
    chunk: str
    policy: str
    way: str

    def __str__(self) -> str:
        return " / ".join(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """`k` drafts a round. `journal`: the whole stream is known, so the replay drafter proposes it."""

    k: int
    kind: DrafterKind = "mtp"
    journal: bool = False

    def fields(self) -> dict[str, Any]:
        """What a request says to be drafted for in this way; the journal is the caller's to fill in."""
        return {"drafter": self.kind, "speculation_k": self.k}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """When the engine lets a stream speculate: by load, and by what its drafts bring."""

    base: EngineLimits

    def limits(self, rounds: int) -> EngineLimits:
        """An engine's limits with bursts of so many rounds."""
        return replace(self.base, burst_rounds=rounds, busy_burst_rounds=max(1, rounds // 2))


BUDGETS: Final[Mapping[str, int]] = {"1 token": 1, "9 tokens": 9, "32 tokens": 32}

DRAFTERS: Final[Mapping[str, Drafting]] = {
    "none": Drafting(k=0),
    "mtp K=1": Drafting(k=1),
    "mtp K=2": Drafting(k=2),
    "mtp K=3": Drafting(k=3),
    "mtp K=5": Drafting(k=5),
    "n-gram K=3": Drafting(k=3, kind="ngram"),
    "n-gram K=7": Drafting(k=7, kind="ngram"),
    "block K=4": Drafting(k=4, kind="block"),
    "block K=7": Drafting(k=7, kind="block"),
    "auto K=4": Drafting(k=4, kind="auto"),
    "replay": Drafting(k=0, journal=True),
}

BURSTS: Final[Mapping[str, int]] = {"1 round": 1, "2 rounds": 2, "7 rounds": 7, "32 rounds": 32}

COMPANIES: Final[Mapping[str, int]] = {"alone": 1, "16 together": 16}

CHUNKS: Final[Mapping[str, int]] = {"chunk 64": 64, "chunk 128": 128, "chunk 512": 512, "chunk 1024": 1024}

POLICIES: Final[Mapping[str, Policy]] = {
    "always draft": Policy(
        base=EngineLimits(spec_gate=None, draft_cost=0.0, ngram_cost=0.0, floor=0.0, decode_ckpt_blocks=1)
    ),
    # Without decode checkpoints: what was set aside is replayed from its prompt.
    "draft if it pays": Policy(base=EngineLimits(spec_gate=SpecGate(), decode_ckpt_blocks=0)),
}

CACHES: Final[Mapping[str, Callable[[Scene], int]]] = {
    "cold": plants.cold,
    "miss": plants.miss,
    "hit at 64": plants.first,
    "hit halfway": plants.halfway,
    "deepest hit": plants.deepest,
    "hit after a split": plants.split,
    "hit after eviction": plants.evicted,
    "hit on a state that came back": plants.returned,
    "next turn of a session": plants.next_turn,
    "hit in the host tier": plants.spilled,
    "another worker's hit": plants.another_workers,
    "exact hit": plants.exact,
}

WAYS: Final[Mapping[str, Callable[[Scene], None]]] = {
    "whole": ways.whole,
    "neighbour cancelled": ways.neighbour_cancelled,
    "resumed": ways.resumed,
    "demoted": ways.demoted,
    "parked and replayed": ways.parked,
    "preempted": ways.preempted,
    "preempted in prime": ways.preempted_in_prime,
    "preempted in decode": ways.preempted_in_decode,
    "overshot": ways.overshot,
    "crowded": ways.crowded,
}

AXES: Final[Mapping[str, Mapping[str, object]]] = {
    "model": MODELS,
    "prompt": PROMPTS,
    "rule": RULES,
    "budget": BUDGETS,
    "drafter": DRAFTERS,
    "burst": BURSTS,
    "company": COMPANIES,
    "cache": CACHES,
    "chunk": CHUNKS,
    "policy": POLICIES,
    "way": WAYS,
}

_UNCACHED: Final = frozenset({"cold", "miss"})
_LIVE: Final = frozenset(WAYS) - {"resumed"}

NEEDS: Final[Mapping[tuple[str, str], Mapping[str, frozenset[str]]]] = {
    # Less than a block is never cached.
    ("prompt", "short"): {"cache": _UNCACHED},
    # The entry ends where the prompt ends.
    ("cache", "exact hit"): {"prompt": frozenset({"on the grid"})},
    # The one model with a block drafter is there for it, and for those who run beside it.
    ("drafter", "block K=4"): {"model": frozenset({"with a block drafter"})},
    ("drafter", "block K=7"): {"model": frozenset({"with a block drafter"})},
    ("drafter", "auto K=4"): {"model": frozenset({"with a block drafter"})},
    ("model", "with a block drafter"): {
        "drafter": frozenset({"block K=4", "block K=7", "auto K=4", "mtp K=3"})
    },
    # A whole journal leaves no other way to know the stream.
    ("drafter", "replay"): {"way": _LIVE},
}
"""(axis, value) -> values of other axes that it can be run with; an axis that is not named is free."""


def meaningful(choice: Mapping[str, str]) -> bool:
    """Whether a (partial) choice can be run."""
    return all(
        choice.get(axis) in (None, *allowed)
        for value in choice.items()
        for axis, allowed in NEEDS.get(value, {}).items()
    )
