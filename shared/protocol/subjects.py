"""Every subject, stream and consumer name, and their limits, in one place.

    req.<fingerprint>.<priority>.<lane>   work, shared by all workers of a fingerprint; each tenant has a lane of its own
    req.<fingerprint>.to.<worker>.<lane>  work for the worker that holds the entry; others take what it leaves
    bell.<fingerprint>.…                  "something came on req.<fingerprint>.…", without it (core NATS, by the server)
    tok.<request>                         the journal of a request: started, frames, one terminal
    cxl.<request>                         its cancellation, if any
    body.<request>                        its prompt in chunks, if it is too large for one message
    dead.<fingerprint>                    requests that killed their workers
    hb.<worker>                           heartbeats (core NATS, not kept)
    brk.v1.<operation>                    broker calls (core request/reply, queue group `broker`)
    audit.<worker>                        what a worker holds, for the audit (core request/reply)
    rdr.<request>                         does somebody read its stream? (core request/reply, answered by readers)

A fingerprint in a subject is its first 16 hex digits: subjects stay short, and the full one is in the request.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from shared.errors import ProtocolError
from shared.protocol.messages import (
    Abort,
    Authenticate,
    BrokerCall,
    Commit,
    Find,
    Forget,
    Freed,
    Lease,
    Lookup,
    Priority,
    Recall,
    Release,
    Remember,
    Reserve,
    Withdraw,
)

TENANT: Final = "burstline-tenant"
DEADLINE: Final = "burstline-deadline-ns"
"""Headers of a request, which tell an operator without decoding; what counts is in the request."""
DELIVERY: Final = "burstline-delivery"
"""Header of a claim: which delivery of its request it answers, counted from 1. A gap after the last claim's tells that who
took the request in between was lost before it claimed."""
DEAD_REASON: Final = "burstline-reason"
"""Header of a dead letter: the code of what it was given up for."""
PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")
BROKER_QUEUE: Final = "broker"
READERS_QUEUE: Final = "readers"
HEARTBEATS: Final = "hb.*"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _token(value: str, what: str) -> str:
    """One subject token; anything else could widen or redirect a subject."""
    if not _TOKEN.fullmatch(value):
        raise ProtocolError(f"{what} may hold letters, digits, '_' and '-', 1 to 64 of them")
    return value


def short(fingerprint: str) -> str:
    """The part of a fingerprint that stands in subjects and consumer names."""
    return _token(fingerprint[:16], "fingerprint")


def lane(tenant: str) -> str:
    """A tenant's lane: stable across processes and releases, and no other tenant's (64 bits of SHA-256, in hex)."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:16]


def request_shared(fingerprint: str, priority: Priority, tenant: str) -> str:
    """Where a request goes that any worker of the fingerprint may take."""
    return f"req.{short(fingerprint)}.{priority}.{lane(tenant)}"


def request_to(fingerprint: str, worker: str, tenant: str) -> str:
    """Where a request goes whose entry one worker holds."""
    return f"{own_queue(fingerprint, worker)}{lane(tenant)}"


def own_queue(fingerprint: str, worker: str) -> str:
    """What the subjects of a worker's own queue begin with."""
    return f"req.{short(fingerprint)}.to.{_token(worker, 'worker id')}."


def lane_of(subject: str) -> str:
    """The tenant's lane in a request subject, shared or a worker's own."""
    return subject.rpartition(".")[2]


def tokens(request: str) -> str:
    """The journal of a request."""
    return f"tok.{_token(request, 'request id')}"


def cancel(request: str) -> str:
    """The cancellation of a request."""
    return f"cxl.{_token(request, 'request id')}"


def body(request: str) -> str:
    """The prompt of a request that is too large for one message."""
    return f"body.{_token(request, 'request id')}"


def dead(fingerprint: str) -> str:
    """Dead letters of a fingerprint."""
    return f"dead.{short(fingerprint)}"


def heartbeat(worker: str) -> str:
    """A worker's heartbeat."""
    return f"hb.{_token(worker, 'worker id')}"


def audit(worker: str) -> str:
    """Where a worker is asked for the entries that it holds."""
    return f"audit.{_token(worker, 'worker id')}"


def readers(request: str) -> str:
    """Where the readers of a request's stream answer, while there are any."""
    return f"rdr.{_token(request, 'request id')}"


_OPERATIONS: Final[dict[type[BrokerCall], str]] = {
    Authenticate: "authenticate",
    Lookup: "lookup",
    Reserve: "reserve",
    Commit: "commit",
    Abort: "abort",
    Lease: "lease",
    Release: "release",
    Withdraw: "withdraw",
    Freed: "freed",
    Remember: "remember",
    Recall: "recall",
    Find: "find",
    Forget: "forget",
}


def broker(call: type[BrokerCall]) -> str:
    """Where a broker call goes."""
    return f"brk.v1.{_OPERATIONS[call]}"


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """A JetStream stream. Sizes in bytes, ages in seconds; every one is bounded."""

    name: str
    subjects: tuple[str, ...]
    work_queue: bool
    max_bytes: int
    max_age_s: int
    max_msg_bytes: int
    max_msgs_per_subject: int  # -1 = no limit of its own
    duplicate_window_s: int
    max_consumers: int | None = None  # null = the server's own limit, which is 1,000 since 2.15
    bells: str | None = None
    """First token of the subjects on which plain subscribers are told, without its data, of every message stored: `req.a`
    rings `bell.a`. At most once: who needs certainty looks as well."""


REQUESTS: Final = StreamSpec(
    name="BURSTLINE_REQUESTS",
    subjects=("req.>",),
    work_queue=True,
    max_bytes=256 << 20,
    max_age_s=6 * 3600,
    max_msg_bytes=1 << 20,
    max_msgs_per_subject=-1,
    duplicate_window_s=120,
    max_consumers=100_000,  # one a lane that was used in the last hours: a tenant beyond them would get no turn
    bells="bell",
)
JOURNAL: Final = StreamSpec(
    name="BURSTLINE_JOURNAL",
    subjects=("tok.*",),
    work_queue=False,
    max_bytes=512 << 20,
    max_age_s=24 * 3600,
    max_msg_bytes=1 << 20,
    max_msgs_per_subject=-1,
    duplicate_window_s=120,
)
CANCELS: Final = StreamSpec(
    name="BURSTLINE_CANCELS",
    subjects=("cxl.*",),
    work_queue=False,
    max_bytes=32 << 20,
    max_age_s=24 * 3600,
    max_msg_bytes=4096,
    max_msgs_per_subject=65,  # a cut of each choice (BURSTLINE_GATEWAY_MAX_CHOICES is 64 at most) and one of all
    duplicate_window_s=120,
)
DEAD: Final = StreamSpec(
    name="BURSTLINE_DEAD",
    subjects=("dead.*",),
    work_queue=False,
    max_bytes=128 << 20,
    max_age_s=7 * 24 * 3600,
    max_msg_bytes=1 << 20,
    max_msgs_per_subject=-1,
    duplicate_window_s=120,
)
BODIES: Final = StreamSpec(
    name="BURSTLINE_BODIES",
    subjects=("body.*",),
    work_queue=False,
    max_bytes=512 << 20,
    max_age_s=24 * 3600,
    max_msg_bytes=1 << 20,
    max_msgs_per_subject=-1,
    duplicate_window_s=120,
)
STREAMS: Final = (REQUESTS, JOURNAL, CANCELS, DEAD, BODIES)


@dataclass(frozen=True, kw_only=True)
class ConsumerSpec:
    """A durable pull consumer of a stream."""

    stream: str
    durable: str
    filter_subject: str
    ack_wait_s: float
    max_ack_pending: int
    idle_limit_s: float | None = None  # unused for so long, it is deleted; its messages stay in the stream
    group: str | None = None  # its pulls have priorities: who pulls with 0 goes before who pulls with 1


def queued(fingerprint: str) -> str:
    """All request subjects of a fingerprint."""
    return f"req.{short(fingerprint)}.>"


def bells(fingerprint: str) -> str:
    """Where a fingerprint's new requests are told of."""
    return f"{REQUESTS.bells}.{short(fingerprint)}.>"


def rung(bell: str) -> str:
    """The request subject that a bell tells of."""
    return f"req.{bell.partition('.')[2]}"


def fingerprint_of(subject: str) -> str:
    """The short fingerprint in a request subject."""
    return subject.split(".")[1]


def request_of(subject: str) -> str:
    """The request that a `tok.<request>` or `cxl.<request>` subject is of."""
    return subject.partition(".")[2]


def queue_of(subject: str) -> str:
    """What a request subject is a queue of: "to", or a priority."""
    return subject.split(".")[2]


def work_consumer(subject: str, *, ack_wait_s: float) -> ConsumerSpec:
    """The durable of one request subject, made by the first worker that finds something on it.

    max_deliver is unlimited: poison is counted by `started` without an end, and dead-lettered by us. Unused for as long as
    a message can be there, it goes: a worker's id does not come again, and of tenants only those of these hours have one.
    """
    to = queue_of(subject) == "to"
    return ConsumerSpec(
        stream=REQUESTS.name,
        durable="-".join(subject.split(".")[1:]),
        filter_subject=subject,
        ack_wait_s=ack_wait_s,
        max_ack_pending=256 if to else 1024,
        idle_limit_s=float(REQUESTS.max_age_s),
        group="spill" if to else None,
    )


def superseded_consumers(fingerprint: str) -> tuple[str, ...]:
    """Durables of an earlier layout of the request stream, one over all lanes of a priority: a work queue refuses the lanes'
    own while those stand. What they had not delivered is in the stream."""
    return tuple(f"{short(fingerprint)}-{priority}" for priority in PRIORITIES)


def settle_consumer() -> ConsumerSpec:
    """The broker's own reading of the journal, from which it settles usage."""
    return ConsumerSpec(
        stream=JOURNAL.name,
        durable="broker-settle",
        filter_subject="tok.*",
        ack_wait_s=30.0,
        max_ack_pending=256,
    )
