"""Rounds of verify counted along a stream that is known: what drafters without a cache would have had accepted.

A greedy verify accepts a draft where it equals the stream, so rounds can be counted without a verify. The trunk pass of a
place is shared by the drafters that stand there; no place's pass uses another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from services.bench.counts import Counts
from services.bench.history import History, Rows
from services.gpu_worker.engine.requests import DrafterKind
from services.prove.axes import Drafting

Propose = Callable[[int, int], Sequence[int]]
"""(index of the anchor in the stream, drafts wanted) -> drafts."""


def count_rounds(propose: Propose, stream: Sequence[int], first: int, end: int, k: int) -> Counts:
    """`first` = index of the token that the prefill decided; `end` = where the budget ends a stream at the latest."""
    anchor, rounds, drafted, accepted = first, 0, [0] * k, [0] * k
    while anchor < len(stream) - 1:
        drafts = propose(anchor, min(k, end - anchor - 2)) if end - anchor > 2 else ()
        truth = stream[anchor + 1 :]
        stood = next(
            (i for i, draft in enumerate(drafts) if i >= len(truth) or draft != truth[i]), len(drafts)
        )
        for place in range(len(drafts)):
            drafted[place] += 1
            accepted[place] += place < stood
        rounds, anchor = rounds + 1, min(anchor + stood + 1, len(stream) - 1)
    return Counts(
        streams=1,
        rounds=rounds,
        tokens=len(stream) - 1 - first,
        drafted_at=tuple(drafted),
        accepted_at=tuple(accepted),
    )


def reference_counts(
    history: History,
    drafters: Mapping[str, Drafting],
    prompt: Sequence[int],
    said: Sequence[int],
    *,
    budget: int,
) -> dict[str, Counts]:
    """Counts of every drafter among `drafters` along one stream."""
    stream, first = [*prompt, *said], len(prompt)
    drafting = {name: one for name, one in drafters.items() if one.k}
    most: dict[DrafterKind, int] = {}
    for one in drafting.values():
        most[one.kind] = max(one.k, most.get(one.kind, 0))
    places = _Places(history, stream, most)
    return {
        name: count_rounds(partial(places.drafts, one.kind), stream, first, first + budget, one.k)
        for name, one in drafting.items()
    }


class _Places:
    """Drafts at the places of one stream, each made from its whole history, `most` of a kind: shorter rounds take the first
    of them, since drafts are picked left to right."""

    def __init__(self, history: History, stream: Sequence[int], most: Mapping[DrafterKind, int]) -> None:
        self._history = history
        self._stream = stream
        self._most = most
        self._rows: dict[int, Rows] = {}
        self._made: dict[tuple[DrafterKind, int], list[int]] = {}

    def drafts(self, kind: DrafterKind, anchor: int, count: int) -> list[int]:
        """See `Propose`."""
        if (kind, anchor) not in self._made:
            if anchor not in self._rows:
                self._rows[anchor] = self._history.rows(self._stream[:anchor])
            before = self._stream[: anchor + 1]
            self._made[kind, anchor] = self._history.drafts(
                kind, before, self._rows[anchor], self._most[kind]
            )
        return self._made[kind, anchor][:count]
