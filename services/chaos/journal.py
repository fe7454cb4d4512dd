"""What the journal says of one request: how often it ended, whether every token came once, which worker came when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.protocol.messages import Frame, Started, StreamMessage, Terminal, unpack_tokens


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A worker's claim; `at_ns` wall clock. It answers the `delivery`-th delivery of the request."""

    worker_id: str
    at_ns: int
    delivery: int = 0


@dataclass(frozen=True, kw_only=True)
class Story:
    """One request, choice 0. `repeated` and `missing` count tokens that frames told again or left out."""

    tokens: tuple[int, ...]
    claims: tuple[Claim, ...]
    terminals: tuple[Terminal, ...]
    repeated: int
    missing: int
    after_end: int

    def differs_from(self, reference: Sequence[int]) -> int:
        """Tokens that are not the reference's at their place."""
        same = sum(one == other for one, other in zip(self.tokens, reference, strict=False))
        return len(self.tokens) - same

    @property
    def miscounted(self) -> bool:
        """Whether a terminal tells another number of tokens than the frames hold."""
        return any(
            end.emitted_tokens != len(self.tokens)
            for terminal in self.terminals
            for end in terminal.ends
            if end.choice == 0 and end.finish != "cancelled"
        )


def story(messages: Sequence[StreamMessage], deliveries: Sequence[int] = ()) -> Story:
    """Read a journal in its order; `deliveries`: of each of its claims."""
    tokens: list[int] = []
    claims: list[Claim] = []
    terminals: list[Terminal] = []
    repeated = missing = after_end = 0
    for message in messages:
        after_end += bool(terminals)
        match message:
            case Started():
                delivery = deliveries[len(claims)] if len(claims) < len(deliveries) else 0
                claims.append(Claim(worker_id=message.worker_id, at_ns=message.at_ns, delivery=delivery))
            case Frame() if message.choice == 0:
                repeated += max(0, len(tokens) - message.offset)
                missing += max(0, message.offset - len(tokens))
                tokens.extend(unpack_tokens(message.tokens))
            case Terminal():
                terminals.append(message)
            case _:
                pass
    return Story(
        tokens=tuple(tokens),
        claims=tuple(claims),
        terminals=tuple(terminals),
        repeated=repeated,
        missing=missing,
        after_end=after_end,
    )
