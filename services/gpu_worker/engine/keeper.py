"""Keeps what decoding made, for the stream itself: the newest decode checkpoint of each, which lets a stream that was
set aside come back without a replay from its prompt (R-Q17).

A checkpoint is taken at a round boundary, where the pending token is the only one that is delivered and not committed: its
rows and the journal's token after them are all that a resumed session needs. It never becomes an entry (C1.3).

Knows streams and the cache. Does not know who runs, nor why one gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.gpu_worker.engine.cache.decoded import DecodedState, Role
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.streams import Stream


class Keeper:
    """`flush` folds a slot, so that a snapshot may be taken; `interval` = blocks between two checkpoints of a stream, 0 =
    none is ever taken."""

    def __init__(self, cache: CacheManager, flush: Callable[[int], None], *, interval: int) -> None:
        self._cache = cache
        self._flush = flush
        self._interval = interval

    def after_burst(self, streams: Iterable[Stream]) -> None:
        """Take the checkpoints that are due: one a boundary, the newest of a stream alone is kept."""
        for stream in streams:
            if self._interval and stream.going and self._blocks_since(stream) >= self._interval:
                self._take(stream)

    def giving_way(self, stream: Stream) -> None:
        """The stream is about to be set aside between two bursts, whole: keep all that it has."""
        if self._interval and self._blocks_since(stream) >= 0:
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

    def ended(self, stream: Stream) -> None:
        """The stream needs nothing any more."""
        self._cache.decoded.drop(stream.checkpoint)
        stream.checkpoint = None

    def _blocks_since(self, stream: Stream) -> int:
        """Blocks of rows since the last checkpoint, or since the prompt's end; negative where none can be taken."""
        session = stream.session
        if not session.primed or not session.has_pending or session.tainted:
            return -1
        last = session.sequence.last_decode_ckpt_block
        start = len(stream.request.tokens) // BLOCK_ROWS if last is None else last
        return session.committed_len // BLOCK_ROWS - start

    def _take(self, stream: Stream) -> None:
        session, sequence = stream.session, stream.session.sequence
        sequence.last_decode_ckpt_block = session.committed_len // BLOCK_ROWS
        self._flush(sequence.ssm_slot_idx())
        sequence.proposer_state = session.proposer_state()
        self._cache.decoded.drop(stream.checkpoint)
        stream.checkpoint = self._cache.decoded.keep(
            sequence, root=stream.request.root, last_hidden=session.last_hidden, role=Role.RUNNING
        )
