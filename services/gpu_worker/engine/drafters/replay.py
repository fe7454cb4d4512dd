"""The replay drafter: tokens that an earlier attempt emitted, proposed where they stood."""

from __future__ import annotations

from collections.abc import Sequence


class ReplayDrafter:
    """Knows the journalled completion of one request. Its drafts are right unless the stream is not the same one."""

    def __init__(self, emitted: Sequence[int]) -> None:
        self._emitted = tuple(emitted)

    def __len__(self) -> int:
        return len(self._emitted)

    def expected(self, index: int) -> int | None:
        """The journalled token at a completion index, null beyond the journal."""
        return self._emitted[index] if index < len(self._emitted) else None

    def propose(self, index: int, k: int) -> list[int]:
        """Up to `k` journalled tokens from completion index `index` on."""
        return list(self._emitted[index : index + k])
