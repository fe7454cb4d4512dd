"""Which drafter a request gets that asks for `auto`: the one with the most tokens a second, by what was measured.

    expected speed-up = tokens a verify x t_plain / (t_draft + t_verify)

Times are of the start-up table, tokens and drafts a verify are averages of the streams that had each drafter (`gain`). Where
no launch was timed, the limits' costs stand in for the times. A drafter nobody has had yet is judged by what its kind
usually brings; one stream in `PROBE_STREAMS` gets the one that was tried the longest ago, so that a change of what is
asked is noticed. The stream keeps all of them ready and goes on by its own counts (`drafters.medley`): on the CPU from round to
round, on a card, whose rounds follow one another, from burst to burst. Tokens never depend on the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from services.gpu_worker.engine.drafters.medley import Cost, Expected
from services.gpu_worker.engine.events import ChoiceReason
from services.gpu_worker.engine.gain import Gain
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import DrafterKind

PROBE_STREAMS: Final = 16


class Chosen(NamedTuple):
    """A drafter, why, and what each that could serve costs and is expected to speed a stream up by."""

    drafter: DrafterKind
    reason: ChoiceReason
    expected: Mapping[DrafterKind, Expected] = {}

    @property
    def gains(self) -> tuple[tuple[DrafterKind, float], ...]:
        """The expectations alone."""
        return tuple((kind, one.rate) for kind, one in self.expected.items())


class Choice:
    """One an engine."""

    def __init__(self, gain: Gain, kinds: Sequence[DrafterKind], limits: EngineLimits) -> None:
        """`kinds` = those that this engine has, in the order in which equals are preferred."""
        self._gain = gain
        self._kinds = tuple(kinds)
        self._costs: dict[DrafterKind, Cost] = {
            "mtp": Cost(0.0, limits.draft_cost),
            "block": Cost(limits.block_cost, limits.ngram_cost),
            "ngram": Cost(0.0, limits.ngram_cost),
        }
        self._streams = 0
        self._tried = dict.fromkeys(self._kinds, 0)

    def choose(self, load: int, fitting: Sequence[DrafterKind]) -> Chosen:
        """The drafter of one more stream beside `load` others; `fitting` = those that can serve it."""
        self._streams += 1
        expected = {kind: self._of(kind, load) for kind in self._kinds if kind in fitting}
        if not expected:
            return Chosen("none", ChoiceReason.NO_GAIN)
        # Of an index the average says little: a stream that suits it offers so itself, round by round (`Medley.offer`).
        models = [kind for kind in expected if kind != "ngram" and expected[kind].rate >= 1.0]
        best = max(models or expected, key=lambda kind: expected[kind].rate)
        reason = ChoiceReason.GAIN
        if self._streams % PROBE_STREAMS == 0:
            best = min(expected, key=self._tried.__getitem__)
            reason = ChoiceReason.PROBE
        elif expected[best].rate < 1.0:
            return Chosen("none", ChoiceReason.NO_GAIN, expected)
        self._tried[best] = self._streams
        return Chosen(best, reason, expected)

    def _of(self, kind: DrafterKind, load: int) -> Expected:
        cost = self._gain.cost(kind, load) or self._costs[kind]
        drafts, tokens = self._gain.seen(kind)
        return Expected(cost, tokens / (1.0 + cost.fixed + cost.each * drafts))
