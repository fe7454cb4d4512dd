"""The affinity pool: finished sessions of each namespace, parked at their grid checkpoint for the next turn.

    finished ──park──> parked (rows and state are the prefix tree's) ──nominated, exact tokens agree──> the next turn's hit

A label (a session id, a user) or else the chain only *nominates* the session that the next turn is expected to go on from;
exact tokens decide (R-S13), and what is restored is the tree's entry, as for any other hit. So the pool adds two things
to the tree: the checkpoints of parked sessions are evicted after everything else, and a prompt that should have gone on
from one and does not is counted, with the reason and the position where it left. It owns no block and no snapshot.

Turns of `reuse = "decode"` wait beside it as decoded states (`keeper`), found by exact tokens alone; the pool counts what
became of the prompts that may go on from one.

Everything is keyed by chain root: another namespace is never nominated (C4).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final

from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.outcome import Decline, TurnOutcome
from services.gpu_worker.engine.sessions.prompt import agreement
from services.gpu_worker.engine.stats import AffinityCounts
from shared.errors import EngineFault

EDGES: Final = (0, 1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Lower edges of the histogram of positions, in tokens."""


class AffinityPool:
    """At most `most` parked sessions, the least recently used go first."""

    def __init__(self, cache: CacheManager, *, most: int) -> None:
        self._cache = cache
        self._most = most
        self._parked: list[Session] = []  #: the most recently used last
        self._served = 0
        self._declined: Counter[str] = Counter()
        self._left_at = [0] * len(EDGES)
        self._turns: Counter[str] = Counter()

    def park(self, session: Session) -> None:
        """Keep a finished session; it has given back everything but its checkpoint. One without a checkpoint is not
        kept. It takes the place of the turn before it."""
        position, key = session.rewind_pos, session.rewind_key
        if position is None or key is None or self._most < 1:
            return
        for older in [other for other in self._parked if _goes_on_from(session, other)]:
            self._drop(older)
        self._parked.append(session)
        self._cache.park(key)
        while len(self._parked) > self._most:
            self._drop(self._parked[0])

    def ask(
        self, root: bytes, tokens: Sequence[int], chain: Sequence[bytes], labels: Sequence[str] = ()
    ) -> int | None:
        """Whether a parked session serves this prompt, and from which position; null also when none is nominated.

        The session stays: other branches of the conversation may come. One whose checkpoint was evicted goes.
        """
        session = self._nominate(root, chain, labels)
        if session is None:
            return None
        declined = session.rewind_to_checkpoint(tokens, self._cache)
        if declined is not None:
            self._count(declined)
            if declined.gone:
                self._drop(session)
            return None
        self._served += 1
        self._parked.remove(session)
        self._parked.append(session)
        return session.rewind_pos

    def _nominate(self, root: bytes, chain: Sequence[bytes], labels: Sequence[str]) -> Session | None:
        """Of the sessions with the first label that any has, the one whose prompt shares most blocks, the newest of
        equals. Without a label the same over all, if a block is shared at all."""
        inside = [session for session in reversed(self._parked) if session.request.root == root]
        for label in labels:
            named = [session for session in inside if label in session.request.labels]
            if named:
                return max(named, key=lambda session: _shared_blocks(session.request.chain, chain))
        best = max(inside, key=lambda session: _shared_blocks(session.request.chain, chain), default=None)
        return best if best is not None and _shared_blocks(best.request.chain, chain) else None

    def _count(self, declined: Decline) -> None:
        self._declined[declined.reason] += 1
        self._left_at[bisect_right(EDGES, declined.position) - 1] += 1

    def _drop(self, session: Session) -> None:
        self._parked.remove(session)
        if session.rewind_key is not None:
            self._cache.unpark(session.rewind_key)

    # -- turns of `reuse = "decode"` ----------------------------------------------------------------------------

    def turn(self, request: GenerateRequest, *, served: bool) -> None:
        """A prompt that opted in was admitted: count whether it goes on from a parked turn, or why and where not."""
        outcome, position = (TurnOutcome.SERVED, 0) if served else self._turn_declined(request)
        self._turns[outcome] += 1
        if outcome is TurnOutcome.DIVERGED:
            self._left_at[bisect_right(EDGES, position) - 1] += 1

    def _turn_declined(self, request: GenerateRequest) -> tuple[TurnOutcome, int]:
        """Of the turns with a label of this prompt, or else of all, the one that agrees longest was the likely one."""
        inside = [turn for turn in self._cache.decoded.parked if turn.root == request.root]
        named = [turn for turn in inside if set(turn.labels) & set(request.labels)]
        agreed = [(agreement(turn.tokens, request.tokens), turn.position) for turn in named or inside]
        most, position = max(agreed, default=(0, 0))
        if not most:
            return TurnOutcome.NOT_KEPT, 0
        if most == len(request.tokens):
            return TurnOutcome.NO_SUFFIX, most
        return (TurnOutcome.DIVERGED if most < position else TurnOutcome.DEEPER_HIT), most

    # -- accounts -----------------------------------------------------------------------------------------------

    def counts(self) -> AffinityCounts:
        """How often the pool was right, and where prompts left the expected path."""
        return AffinityCounts(
            parked=len(self._parked),
            served=self._served,
            declined=tuple(sorted(self._declined.items())),
            left_at=tuple(zip(EDGES, self._left_at, strict=True)),
            turns=tuple(sorted(self._turns.items())),
        )

    def check(self) -> None:
        """Raises EngineFault unless the pool is within its bound and holds exactly the checkpoints it asked to keep."""
        if len(self._parked) > self._most:
            raise EngineFault(f"{len(self._parked)} sessions are parked of {self._most} at most")
        held = Counter(session.rewind_key for session in self._parked)
        if held != self._cache.parked:
            raise EngineFault("checkpoints are kept for sessions that are not parked")
        if any(session.sequence.block_table or session.has_pending for session in self._parked):
            raise EngineFault("a parked session holds rows of its own")


def _shared_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks of the common prefix; a chain key names all tokens below it."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _goes_on_from(session: Session, other: Session) -> bool:
    """Whether `other` is an earlier turn of the same conversation: same labels, its checkpoint in this one's prompt."""
    mine, theirs = session.request, other.request
    return mine.root == theirs.root and mine.labels == theirs.labels and other.rewind_key in mine.chain
