"""Calls to the broker about requests that came with an Idempotency-Key, whose answer can be told again."""

from __future__ import annotations

from shared.protocol.messages.base import Message, Reply
from shared.protocol.messages.requests import GenerateRequest


class AnswerSheet(Message, frozen=True, kw_only=True):
    """What a gateway needs to tell a request's stream again: how its tokens become an answer.

    `request` is the one that was enqueued, without salt and labels, and without its prompt unless the answer tells it.
    """

    request: GenerateRequest
    prompt_tokens: int
    chat: bool  # a conversation's answer, else a completion's
    tools: bool  # calls are parsed
    thinking: bool  # the prompt ends inside a thinking block
    stops: tuple[str, ...]
    usage_chunk: bool
    token_ids: bool
    echo: bool  # each choice begins with the prompt
    prompt_logprobs: int | None  # to tell beside the answer; None = not asked for
    route: str


class Remember(Message, frozen=True, kw_only=True):
    """Bind an Idempotency-Key to a request, unless it is bound already: then the reply tells what to.

    Failure `idempotency_key_reused` when it stands for another body. A request that fails or is cancelled frees its key.
    """

    tenant: str
    key: str  # SHA-256 of the caller's key, hex
    body: str  # SHA-256 of what was asked, hex
    request_id: str
    sheet: bytes  # an encoded AnswerSheet
    deadline_ns: int  # the request's


class Recall(Message, frozen=True, kw_only=True):
    """What an Idempotency-Key is bound to, if it is. Fails as `Remember` does."""

    tenant: str
    key: str
    body: str


class Find(Message, frozen=True, kw_only=True):
    """A request of the tenant that carried a key, by its id."""

    tenant: str
    request_id: str


class Remembered(Reply, frozen=True, kw_only=True):
    """`request_id` None = nothing is bound. `new`: this call bound it."""

    request_id: str | None
    sheet: bytes
    new: bool


class Forget(Message, frozen=True, kw_only=True):
    """The request was never enqueued: its key is free again. Idempotent."""

    tenant: str
    request_id: str
