"""Which of several drafters proposes next, for one stream: the one that has been bringing it the most for what it costs.

    rate of a round = tokens it brought / (1 + fixed + drafts x each)        in verify passes, of its drafter

Of each drafter the rate is first what is expected of it and then, round by round, an average of what it brought. Every
`PROBE_TURNS`-th turn goes to one of the others, the least recently asked, so that a passage that suits it better is noticed;
soon after the beginning so do two more, to those that are expected to come near. A turn is a round, or as many as are run
before `next` is asked again: on a card a burst, whose rounds follow one another unasked.
A drafter whose drafts are seen before they cost anything, as an index', may be *offered* in another's turn: it gets the
round if just these drafts should bring more than that one does. Such rounds say nothing of its rate, since it chose them.

What is expected and what drafts cost are told once; after that only counts decide, so a stream that is run again under the
same expectations drafts the same. Tokens never depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from services.gpu_worker.engine.drafters.gate import PRIOR, DraftGate
from services.gpu_worker.engine.requests import DrafterKind

PROBE_TURNS: Final = 12
WEIGHT: Final = 0.125
"""Of the newest round in an average, at least."""
PROBE_WEIGHT: Final = 0.5
EARLY_PROBES: Final = (2, 5)
"""Turns of a stream in which others are tried before the first regular probe."""
NEAR: Final = 0.75
"""Of the preferred one's rate, with which another is tried so early."""
EXPECTED_ROUNDS: Final = 1
"""Rounds that the expectation counts for."""
OFFER_PRIOR: Final = 0.5
"""Chance assumed of the first draft that an index has: it is offered before any was tried."""
HYSTERESIS: Final = 1.05
"""By how much another must be better to be preferred: a switch is told, and should mean something."""


class Cost(NamedTuple):
    """In verify passes: of drafting at all, and of each draft with its column."""

    fixed: float
    each: float


class Expected(NamedTuple):
    """What is known of a drafter before the stream begins."""

    cost: Cost
    rate: float


class Medley:
    """The drafters of one stream, by name, in the order in which equals are preferred."""

    def __init__(self, expected: Mapping[DrafterKind, Expected], *, most: int, first: DrafterKind) -> None:
        """`most` = drafts a round; `first` = who is preferred at the start."""
        self._costs = {name: one.cost for name, one in expected.items()}
        self.rates = {name: one.rate for name, one in expected.items()}
        """Tokens a verify pass' time, of each."""
        self._most = most
        self._gates = {
            name: DraftGate(
                most=most,
                cost=one.cost.each,
                fixed=one.cost.fixed,
                prior=OFFER_PRIOR if name == "ngram" else PRIOR,
            )
            for name, one in expected.items()
        }
        self.preferred = first
        """The best one, probes aside."""
        self.asked = self.preferred
        """Whose turn it is."""
        self._seen = dict.fromkeys(expected, 0)
        self._last = dict.fromkeys(expected, -1)
        self._turns = 0
        self._offered = False

    def next(self) -> DrafterKind:
        """Whose turn is next."""
        turn, self._turns, self._offered = self._turns, self._turns + 1, False
        others = [name for name in self.rates if name != self.preferred]
        if turn in EARLY_PROBES:
            others = [name for name in others if self.rates[name] >= NEAR * self.rates[self.preferred]]
        elif turn % PROBE_TURNS < PROBE_TURNS - 1:
            others = []
        self.asked = min(others, key=self._last.__getitem__, default=self.preferred)
        return self.asked

    def offer(self, name: DrafterKind, drafts: int) -> bool:
        """Whether `name`, which has so many drafts at hand, gets the round in place of whose turn it is. Never the first
        one: what a stream is like is best asked of the one that was chosen for it."""
        cost = self._costs[name]
        rate = self._gates[name].tokens(drafts) / (1.0 + cost.fixed + drafts * cost.each)
        if self._turns > 1 and name != self.asked and rate > self.rates[self.asked]:
            self.asked, self._offered = name, True
        return self._offered

    def width(self) -> int:
        """Drafts of the round that follows; a probe asks for some even where none are expected to pay, and for all
        where drafting at all is what costs."""
        width = self._gates[self.asked].width()
        if self.asked == self.preferred:
            return width
        return self._most if self._costs[self.asked].fixed else max(1, width)

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a round of the turn that `next` was answered for."""
        name = self.asked
        cost = self._costs[name]
        took = 1.0 + (cost.fixed + drafted * cost.each if drafted else 0.0)
        self._gates[name].observe(drafted, accepted)
        if self._offered:
            return
        self._seen[name] += 1
        self._last[name] = self._turns
        # What a probe says is all there is to know of the last dozens of rounds.
        least = WEIGHT if name == self.preferred else PROBE_WEIGHT
        weight = max(least, 1.0 / (EXPECTED_ROUNDS + self._seen[name]))
        self.rates[name] += weight * ((1 + accepted) / took - self.rates[name])
        best = max(self.rates, key=self.rates.__getitem__)
        if self.rates[best] > HYSTERESIS * self.rates[self.preferred]:
            self.preferred = best
