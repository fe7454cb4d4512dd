"""What speculation gains over plain decode on this machine, from measured launches and from what drafts bring.

    gain = tokens a verify x t_plain / (drafts x t_draft + t_verify)

Times are of launches of one width, measured once when the engine starts, for a few batches (`trials`). Tokens and drafts a
verify are running averages over the streams of each drafter. Above the spec gate's bounds this decides
(`scheduler.speculation`), and which drafter a stream gets that leaves it to the worker (`choice`); which tokens a stream has
never depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.gpu_worker.engine.drafters.gate import PRIOR
from services.gpu_worker.engine.drafters.medley import Cost
from services.gpu_worker.engine.events import Burst, Event, Share
from services.gpu_worker.engine.requests import DrafterKind

MEMORY_ROUNDS: Final = 64.0
"""Rounds after which the averages have forgotten two thirds of what was before."""
ASSUMED_ROUNDS: Final = 8
"""Rounds that what is assumed of a drafter counts for."""
FIRST: Final[Mapping[DrafterKind, tuple[float, float]]] = {
    "mtp": (3.0, sum(PRIOR**place for place in range(4))),
    "block": (7.0, sum(PRIOR**place for place in range(8))),
    "ngram": (3.0, 1.4),
}
"""(drafts, tokens) a verify, of a drafter that nobody has had yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds of launches that hold `batch` sequences: a verify of one column, of `columns`, a draft a sequence (0 without
    a head to draft with), and a pass over a block each (0 without a block drafter)."""

    batch: int
    plain: float
    columns: int
    full: float
    draft: float
    block: float = 0.0

    def gain(self, drafts: float, tokens: float, kind: DrafterKind = "mtp") -> float:
        """Tokens a second, over those of plain decode, with `drafts` drafts and `tokens` tokens a verify. A verify of a
        width between takes a time between."""
        share = drafts / (self.columns - 1) if self.columns > 1 else 0.0
        verify = self.plain + share * (self.full - self.plain)
        drafting = {"mtp": drafts * self.draft, "block": self.block}.get(kind, 0.0)
        return tokens * self.plain / (drafting + verify)


class Gain:
    """Of the engine's streams now. Without paces nothing is known."""

    def __init__(self, paces: Sequence[Pace] = ()) -> None:
        """`paces` by batch, ascending."""
        self._paces = tuple(paces)
        self._seen: dict[DrafterKind, tuple[float, float]] = {}
        self._rounds: dict[DrafterKind, int] = {}

    def learn(self, events: Iterable[Event]) -> None:
        """Take in what bursts with drafts brought."""
        for event in events:
            for share in event.shares if isinstance(event, Burst) else ():
                if share.drafted and share.drafter in FIRST:
                    self._learn(share)

    def _learn(self, share: Share) -> None:
        """The first rounds of a drafter count for more: what was assumed of it is soon forgotten."""
        before = self._rounds.get(share.drafter, 0) + ASSUMED_ROUNDS
        self._rounds[share.drafter] = before + share.rounds - ASSUMED_ROUNDS
        slow = 1.0 - (1.0 - 1.0 / MEMORY_ROUNDS) ** share.rounds
        weight = max(slow, share.rounds / (before + share.rounds))
        drafts, tokens = self.seen(share.drafter)
        drafts += weight * (share.drafted / share.rounds - drafts)
        tokens += weight * (1.0 + share.accepted / share.rounds - tokens)
        self._seen[share.drafter] = drafts, tokens

    def seen(self, kind: DrafterKind) -> tuple[float, float]:
        """(drafts, tokens) a verify of a drafter's streams."""
        return self._seen.get(kind, FIRST[kind])

    def of(self, kind: DrafterKind, load: int) -> float | None:
        """What a drafter gains with so many streams, by the smallest batch measured that holds them; null when none was."""
        if not self._paces:
            return None
        return self._pace(load).gain(*self.seen(kind), kind)

    def cost(self, kind: DrafterKind, load: int) -> Cost | None:
        """What a drafter costs with so many streams, in verify passes of one column; null when no launch was timed."""
        if not self._paces:
            return None
        pace = self._pace(load)
        column = max(0.0, pace.full - pace.plain) / max(1, pace.columns - 1) / pace.plain
        fixed = pace.block / pace.plain if kind == "block" else 0.0
        return Cost(fixed, column + (pace.draft / pace.plain if kind == "mtp" else 0.0))

    def _pace(self, load: int) -> Pace:
        return next((pace for pace in self._paces if pace.batch >= load), self._paces[-1])

    def at(self, load: int) -> float | None:
        """The gain with so many streams of the best drafter that any has had; of the head, before any did."""
        if not self._paces:
            return None
        kinds: tuple[DrafterKind, ...] = tuple(self._seen) or ("mtp",)
        return max(self.of(kind, load) or 0.0 for kind in kinds)
