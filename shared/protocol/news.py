"""What a token stream's state machine asks of its reader: news to relay, and reads to do. See `shared.protocol.stream`."""

from __future__ import annotations

from dataclasses import dataclass

from shared.protocol.messages import Started, Terminal, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A worker has the request. The first one binds it to a fingerprint."""

    started: Started


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Log probabilities of prompt tokens: `entries[i]` is of token `offset + i + 1`; `offset` = entries relayed before."""

    offset: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True)
class Emit:
    """New tokens of a choice; `offset` = completion tokens of it relayed before."""

    choice: int
    offset: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, kw_only=True)
class ReadJournal:
    """Read what is stored after this sequence, perhaps after a pause; then call `read_done`."""

    after: int
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ReadLast:
    """Read the last stored message, perhaps after a pause; then call `confirm`."""

    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class End:
    """The stream is over. Nothing comes after it."""

    terminal: Terminal


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something that must not happen: the message was dropped. `reason` holds no tokens.

    The reader should end its stream with an error: what comes after may not fit what was relayed.
    """

    reason: str


Action = Claimed | Scored | Emit | ReadJournal | ReadLast | End | Alarm
