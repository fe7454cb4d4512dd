"""Keeps what decoding made. For the stream itself: the newest decode checkpoint of each, which lets a stream that was set
aside come back without a replay from its prompt (R-Q17). For the next turn, if both opted in: the rows and the state of
a finished session, flushed to its last delivered token (`reuse = "decode"`, C1.3).

A checkpoint is taken at a round boundary, where the pending token is the only one that is delivered and not committed: its
rows and the journal's token after them are all that a resumed session needs. It never becomes an entry (C1.3).

Knows streams and the cache. Does not know who runs, nor why one gives way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from services.gpu_worker.engine.cache.decoded import DecodedState, Role
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.sessions.append import flush_ends
from services.gpu_worker.engine.sessions.handoff import FlushForward
from services.gpu_worker.engine.streams import Stream
from shared.errors import EngineFault

log = logging.getLogger(__name__)


class Keeper:
    """`runner` makes the launches that settle a sequence; `interval` = blocks between two checkpoints of a stream, 0 =
    none is ever taken."""

    def __init__(self, cache: CacheManager, runner: FlushForward, *, interval: int) -> None:
        self._cache = cache
        self._runner = runner
        self._interval = interval

    def after_burst(self, streams: Iterable[Stream]) -> None:
        """Take the checkpoints that are due: one a boundary, the newest of a stream alone is kept. Those that are due a block
        later are taken with them: so many streams come to have theirs together, and bursts between follow one another
        without a pause."""
        running = [stream for stream in streams if stream.going]
        if self._due(running):
            for stream in running:
                if self._blocks_since(stream) >= max(1, self._interval - 1) and self._keeps(stream):
                    self._take(stream)

    def due_soon(self, streams: Iterable[Stream]) -> bool:
        """Whether a round of these streams may bring a checkpoint."""
        return self._due([stream for stream in streams if stream.going], a_round=True)

    def giving_way(self, stream: Stream) -> None:
        """The stream is about to be set aside between two bursts, whole: keep all that it has."""
        if self._interval and self._blocks_since(stream) >= 0 and self._keeps(stream):
            self._take(stream)

    def waits(self, stream: Stream) -> None:
        """The stream stands in the line again."""
        if stream.checkpoint is not None:
            stream.checkpoint.role = Role.WAITING

    def runs(self, stream: Stream, checkpoint: DecodedState) -> None:
        """The stream came back from its checkpoint, which stays its newest one."""
        checkpoint.role = Role.RUNNING
        stream.checkpoint = checkpoint
        stream.session.sequence.last_decode_ckpt_block = checkpoint.position // BLOCK_ROWS

    def turn_ends(self, streams: Iterable[Stream]) -> None:
        """Keep what opted-in streams that came to their own end have decoded, flushed, for the next turn. A launch that
        fails costs what would have been kept, nothing else (C3)."""
        ends = [(stream, _unwritten(stream)) for stream in streams if self._may_park(stream)]
        if not ends:
            return
        try:
            flush_ends([(stream.session, token) for stream, token in ends], self._runner)
        except EngineFault as fault:
            log.warning("%d ended turns are not kept for their next one: %s", len(ends), fault.code)
            return
        for stream, _ in ends:
            self._park(stream)

    def _may_park(self, stream: Stream) -> bool:
        session, ending = stream.session, stream.session.ending
        opted = stream.request.reuse == "decode" and stream.request.use_cache
        if not opted or ending is None or ending.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        if stream.aside or session.tainted or stream.fed - session.committed_len not in (0, 1):
            return False
        short = stream.fed - session.committed_len
        room = session.committed_len + short <= session.cache_max_ctx
        return room and (not short or self._cache.grow(session.sequence, short))

    def _park(self, stream: Stream) -> None:
        session = stream.session
        session.sequence.proposer_state = session.proposer_state()
        parked = self._cache.decoded.keep(
            session.sequence,
            root=stream.request.root,
            last_hidden=session.last_hidden,
            role=Role.PARKED,
            labels=stream.request.labels,
        )
        if parked is not None:
            self._cache.decoded.replace(parked)

    def ended(self, stream: Stream) -> None:
        """The stream needs nothing any more."""
        self._cache.decoded.drop(stream.checkpoint)
        stream.checkpoint = None

    def _due(self, streams: Iterable[Stream], *, a_round: bool = False) -> bool:
        """Whether a checkpoint is due of any, now or after `a_round` of as many rows as may come."""
        return self._interval > 0 and any(
            self._blocks_since(stream, stream.session.rows_wanted if a_round else 0) >= self._interval
            and self._keeps(stream)
            for stream in streams
        )

    def _keeps(self, stream: Stream) -> bool:
        """Whether a checkpoint of the stream has a place, its last one's or one more: settling a slot for nothing costs a
        launch a layer, and the round that flies."""
        last = stream.checkpoint
        return (last is not None and last.alive) or self._cache.decoded.has_place

    def _blocks_since(self, stream: Stream, more: int = 0) -> int:
        """Blocks of rows, and of `more` to come, since the last checkpoint or the prompt's end; negative where none can be
        taken."""
        session = stream.session
        if not session.primed or not session.at_rest or session.tainted:
            return -1
        last = session.sequence.last_decode_ckpt_block
        start = len(stream.request.tokens) // BLOCK_ROWS if last is None else last
        return (session.committed_len + more) // BLOCK_ROWS - start

    def _take(self, stream: Stream) -> None:
        session, sequence = stream.session, stream.session.sequence
        sequence.last_decode_ckpt_block = session.committed_len // BLOCK_ROWS
        self._runner.flush(sequence.ssm_slot_idx())
        sequence.proposer_state = session.proposer_state()
        self._cache.decoded.drop(stream.checkpoint)
        stream.checkpoint = self._cache.decoded.keep(
            sequence, root=stream.request.root, last_hidden=session.last_hidden, role=Role.RUNNING
        )


def _unwritten(stream: Stream) -> int | None:
    """The last delivered token, where it has no row yet: the budget ended the stream with it."""
    return stream.emitted[-1] if stream.fed > stream.session.committed_len else None
