"""How many drafts pay, and whether any do: speculation must never cost more than it brings.

A round of k drafts costs 1 + fixed + k * cost verify passes and brings 1 + a_1 + ... + a_k tokens, where a_i is the chance
that the first i drafts all stand; `fixed` is what the first draft costs beyond the others, as one pass over a block does.
The gate keeps the chance of each draft given the ones before it, from the stream's own rounds, and takes the k with the
most tokens a cost. A chance is first the mean of what was seen and of `PRIOR_ROUNDS` rounds at `PRIOR`, so that a few
rounds settle it, and then a moving average. A draft never tried is as good as the one before it: a drafter whose first
drafts stand gets its whole length at once, one whose first drafts fall gets none. One draft more than pays is tried now
and then, so that a better passage is noticed.

The same rounds feed the floor (FR-22): when `floor_rounds` of them together bring fewer tokens a verify than `floor`,
the drafter is useless to this stream and is turned off for good. A round counts when drafts were made or when the gate
itself found that none pay; one in which the drafter had nothing to propose cost nothing and says nothing.

It sees counts alone, no clock: k, like the tokens, is the same in every run of a request.
"""

from __future__ import annotations

from typing import Final

PRIOR: Final = 0.8
"""Chance assumed of the first draft before any was tried, unless told: optimistic, so that drafters are tried at all."""
PRIOR_ROUNDS: Final = 2
"""Rounds that the assumption counts for."""
WEIGHT: Final = 0.125
"""Of the newest round in the average, at least: about eight rounds of memory."""
PROBE_ROUNDS: Final = 16
"""Every so many rounds one draft more than pays is tried."""


class Floor:
    """`least` tokens a verify that `rounds` rounds together must bring; 0 = no floor."""

    def __init__(self, least: float, rounds: int) -> None:
        self.missed = False
        self._least, self._rounds = least, rounds
        self._judged = self._brought = 0

    def observe(self, accepted: int) -> None:
        """A round that counts."""
        self._judged += 1
        self._brought += 1 + accepted
        if self._judged == self._rounds:
            self.missed = self.missed or self._brought < self._least * self._judged
            self._judged = self._brought = 0


class DraftGate:
    """The gate of one stream. `cost` = what one draft costs, in verify passes; 0 leaves every k open. `fixed` = what any
    draft at all costs before. `floor` = tokens a verify that `floor_rounds` rounds together must bring; 0 = no floor."""

    def __init__(
        self,
        *,
        most: int,
        cost: float,
        fixed: float = 0.0,
        floor: float = 0.0,
        floor_rounds: int = 1,
        prior: float = PRIOR,
    ) -> None:
        self._most = most
        self._prior = prior
        self._cost = cost
        self._fixed = fixed
        self._floor = Floor(floor, floor_rounds)
        self._chance: list[float] = []  #: of each position that was tried; they are tried in order
        self._tried = [0] * most
        self._rounds = 0

    @property
    def rungs(self) -> int:
        """Columns of the widest verify of a ladder; 0 = this is none."""
        return 0

    @property
    def useless(self) -> bool:
        """Whether the floor was missed: to be asked after each round."""
        return self._floor.missed

    def width(self) -> int:
        """Drafts for the next round, 0 to `most`."""
        best = self._paying()
        if best < self._most and self._rounds % PROBE_ROUNDS == PROBE_ROUNDS - 1:
            return best + 1
        return best

    def tokens(self, drafts: int) -> float:
        """What a round of so many drafts brings, the target's own token among it."""
        stands, tokens = 1.0, 1.0
        for position in range(drafts):
            stands *= self._stands(position)
            tokens += stands
        return tokens

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a round: drafts after the first that fell say nothing."""
        if drafted or not self._paying():
            self._floor.observe(accepted)
        self._rounds += 1
        for position in range(min(drafted, accepted + 1, self._most)):
            before = self._stands(position)
            if position == len(self._chance):
                self._chance.append(before)
            self._tried[position] += 1
            stood = 1.0 if position < accepted else 0.0
            weight = max(WEIGHT, 1.0 / (PRIOR_ROUNDS + self._tried[position]))
            self._chance[position] = before + weight * (stood - before)

    def _stands(self, position: int) -> float:
        """Chance that a draft stands, given the ones before it."""
        known = self._chance[: position + 1]
        return known[-1] if known else self._prior

    def _paying(self) -> int:
        if self._cost <= 0.0:
            return self._most
        best, best_rate, stands, tokens = 0, 1.0, 1.0, 1.0
        for k in range(1, self._most + 1):
            stands *= self._stands(k - 1)
            tokens += stands
            rate = tokens / (1.0 + self._fixed + k * self._cost)
            if rate > best_rate:
                best, best_rate = k, rate
        return best
