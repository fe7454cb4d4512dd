"""`burstline dead`: requests that were given up and kept (poison, faults of ours, what no worker could read).

The letter of a request is told apart by its place in the stream. Its caller was answered: its journal has its end, and no
later attempt may write there (C2). So requeueing makes a new request of it, whose id follows from the letter: asked for
twice, it runs once. It is bound to the same fingerprint, gets a new deadline, is charged to its tenant, and, if it kills
its workers again, becomes a letter again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from shared.clock import Clock
from shared.errors import Conflict, NotFound, ProtocolError
from shared.protocol import codec, subjects
from shared.protocol.messages import ClaimCheck, GenerateRequest, Terminal, unpack_tokens
from shared.transport import bodies
from shared.transport.base import Received, Transport

REASON: Final = subjects.DEAD_REASON
_PAGE: Final = 64
_APPEND_S: Final = 5.0
_ALL: Final = subjects.DEAD.subjects[0]


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A dead letter. `request` is None for one that cannot be read, and has no prompt where there is a `check` for it."""

    place: int
    reason: str
    size: int
    stored: Received
    request: GenerateRequest | None
    check: ClaimCheck | None

    @property
    def prompt_tokens(self) -> int:
        """Of a request that can be read."""
        size = (
            self.check.prompt_bytes
            if self.check is not None
            else len(self.request.prompt)
            if self.request
            else 0
        )
        return size // 4

    @classmethod
    def of(cls, stored: Received) -> Letter:
        """From what the stream holds."""
        try:
            work = codec.decode(stored.data)
        except ProtocolError:
            work = None
        check = work if isinstance(work, ClaimCheck) else None
        request = check.request if check is not None else work if isinstance(work, GenerateRequest) else None
        return cls(
            place=stored.sequence,
            reason=stored.headers.get(REASON, "unknown"),
            size=len(stored.data),
            stored=stored,
            request=request,
            check=check,
        )


async def letters(transport: Transport, *, limit: int) -> list[Letter]:
    """The oldest `limit` letters."""
    found: list[Letter] = []
    after = 0
    while len(found) < limit:
        page = await transport.read(
            subjects.DEAD.name, _ALL, after=after, limit=min(_PAGE, limit - len(found))
        )
        if not page:
            break
        found.extend(Letter.of(stored) for stored in page)
        after = page[-1].sequence
    return found


async def letter(transport: Transport, place: int) -> Letter:
    """One letter. Raises NotFound."""
    page = await transport.read(subjects.DEAD.name, _ALL, after=place - 1, limit=1)
    if not page or page[0].sequence != place:
        raise NotFound(f"there is no dead letter {place}")
    return Letter.of(page[0])


async def requeue(transport: Transport, clock: Clock, place: int, *, deadline_s: float) -> str:
    """Enqueue a letter's request as a new one, then delete the letter. The new request's id.

    Raises:
        NotFound: there is no such letter, or its prompt is gone.
        Conflict: it cannot be read, so nothing can be made of it.
        Overloaded, Unavailable: it is not, or may not be, on the queue; the letter is still there.
    """
    found = await letter(transport, place)
    if found.request is None:
        raise Conflict(f"dead letter {place} is not a request that this release can read")
    whole = found.request if found.check is None else await bodies.redeem(transport, found.check)
    now = clock.wall_ns()
    request_id = again(found.request.request_id, place)
    request = msgspec.structs.replace(
        whole, request_id=request_id, created_ns=now, deadline_ns=now + int(deadline_s * 1e9)
    )
    subject = subjects.request_shared(request.namespace.fingerprint, request.priority, request.tenant)
    headers = {name: value for name, value in found.stored.headers.items() if name != REASON}
    headers[subjects.DEADLINE] = str(request.deadline_ns)
    if not await _known(transport, request_id):
        data = await bodies.pack(
            transport, request, headers, most_bytes=len(request.prompt), timeout=_APPEND_S
        )
        await transport.append(subject, data, message_id=request_id, headers=headers)
    await drop(transport, place)
    return request_id


async def _known(transport: Transport, request_id: str) -> bool:
    """Whether an earlier requeue of the same letter was worked on already."""
    return await transport.last(subjects.JOURNAL.name, subjects.tokens(request_id)) is not None


def again(request_id: str, place: int) -> str:
    """The id of a letter's next life: at most 64 characters, the same however often it is asked for."""
    tail = f"-re{place}"
    return request_id.partition("-re")[0][: 64 - len(tail)] + tail


async def drop(transport: Transport, place: int) -> None:
    """Delete a letter for good. Raises NotFound."""
    await transport.delete(subjects.DEAD.name, place)


async def outcome(transport: Transport, request_id: str) -> Terminal | None:
    """How a request ended, if it has."""
    last = await transport.last(subjects.JOURNAL.name, subjects.tokens(request_id))
    decoded = None if last is None else codec.decode(last.data)
    return decoded if isinstance(decoded, Terminal) else None


def row(one: Letter) -> tuple[object, ...]:
    """What a list shows of a letter; nothing of what was asked."""
    request = one.request
    if request is None:
        return (one.place, one.reason, "-", "-", "-", "-", one.size)
    created = datetime.fromtimestamp(request.created_ns / 1e9, UTC)
    who = (request.request_id, request.tenant, request.model)
    return (one.place, one.reason, *who, created, one.prompt_tokens)


ROW: Final = ("place", "reason", "request", "tenant", "model", "created", "prompt tokens")


def fields(one: Letter, *, tokens: bool) -> Sequence[tuple[str, object]]:
    """Everything of a letter, for one who mends it; what the caller said, the prompt's ids and the grammar, only if asked
    for."""
    request = one.request
    head = [("place", one.place), ("reason", one.reason), ("bytes", one.size)]
    if request is None:
        return head
    told: list[tuple[str, object]] = [*head, ("prompt tokens", one.prompt_tokens)]
    for name, value in msgspec.structs.asdict(request).items():
        if name not in ("prompt", "grammar") and value is not msgspec.UNSET:
            told.append((name, msgspec.json.encode(value).decode()))
    if tokens:
        told.append(("prompt", " ".join(map(str, unpack_tokens(request.prompt)))))
        if request.grammar is not msgspec.UNSET:
            told.append(("grammar", request.grammar))
    return told
