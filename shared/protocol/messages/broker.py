"""The broker by request and reply on `brk.v1.<operation>`: who a key is, and the unions of all its calls."""

from __future__ import annotations

from shared.protocol.messages.base import Message, Reply
from shared.protocol.messages.entries import (
    Abort,
    Commit,
    Freed,
    Lease,
    LeaseReply,
    Lookup,
    LookupReply,
    Release,
    Reserve,
    ReserveReply,
    Withdraw,
    WithdrawReply,
)
from shared.protocol.messages.keyed import Find, Forget, Recall, Remember, Remembered


class Authenticate(Message, frozen=True, kw_only=True):
    """`key_digest` = SHA-256 of the API key, hex. The key itself never leaves the gateway."""

    key_digest: str


class Identity(Reply, frozen=True, kw_only=True):
    """Who a key stands for and what it may do."""

    tenant: str
    key_id: str
    models: tuple[str, ...]  # () = all
    max_concurrent: int | None


class Done(Reply, frozen=True, kw_only=True):
    """Nothing to say but that it happened."""


BrokerCall = (
    Authenticate
    | Lookup
    | Reserve
    | Commit
    | Abort
    | Lease
    | Release
    | Withdraw
    | Freed
    | Remember
    | Recall
    | Find
    | Forget
)


BrokerReply = Identity | LookupReply | ReserveReply | LeaseReply | WithdrawReply | Remembered | Done
