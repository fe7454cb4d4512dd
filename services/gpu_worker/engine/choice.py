"""Which drafter a request gets that asks for `auto`: the one with the most tokens a second, by what was measured.

    expected speed-up = tokens a verify x t_plain / (t_draft + t_verify)

Times are of the start-up table, tokens and drafts a verify are averages of the streams that had each drafter (`gain`). Where
no launch was timed, the limits' costs stand in for the times. A drafter nobody has had yet is judged by what its kind
usually brings; one stream in `PROBE_STREAMS` gets the one that was tried the longest ago, so that a change of what is
asked is noticed. Tokens never depend on the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from services.gpu_worker.engine.events import ChoiceReason
from services.gpu_worker.engine.gain import Gain
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import DrafterKind

PROBE_STREAMS: Final = 16


class Chosen(NamedTuple):
    """A drafter, why, and what each is expected to speed a stream up by."""

    drafter: DrafterKind
    reason: ChoiceReason
    gains: tuple[tuple[DrafterKind, float], ...]


class Choice:
    """One an engine."""

    def __init__(self, gain: Gain, kinds: Sequence[DrafterKind], limits: EngineLimits) -> None:
        """`kinds` = those that this engine has, in the order in which equals are preferred."""
        self._gain = gain
        self._kinds = tuple(kinds)
        self._costs: dict[DrafterKind, tuple[float, float]] = {
            "mtp": (0.0, limits.draft_cost),
            "block": (limits.block_cost, limits.ngram_cost),
            "ngram": (0.0, limits.ngram_cost),
        }
        self._streams = 0
        self._tried = dict.fromkeys(self._kinds, 0)

    def choose(self, load: int, fitting: Sequence[DrafterKind]) -> Chosen:
        """The drafter of one more stream beside `load` others; `fitting` = those that can serve it."""
        self._streams += 1
        gains = tuple((kind, self._of(kind, load)) for kind in self._kinds if kind in fitting)
        if not gains:
            return Chosen("none", ChoiceReason.NO_GAIN, ())
        best, most = max(gains, key=lambda pair: pair[1])
        reason = ChoiceReason.GAIN
        if self._streams % PROBE_STREAMS == 0:
            best = min((kind for kind, _ in gains), key=lambda kind: self._tried[kind])
            reason = ChoiceReason.PROBE
        elif most < 1.0:
            return Chosen("none", ChoiceReason.NO_GAIN, gains)
        self._tried[best] = self._streams
        return Chosen(best, reason, gains)

    def _of(self, kind: DrafterKind, load: int) -> float:
        timed = self._gain.of(kind, load)
        if timed is not None:
            return timed
        drafts, tokens = self._gain.seen(kind)
        fixed, each = self._costs[kind]
        return tokens / (1.0 + fixed + each * drafts)
