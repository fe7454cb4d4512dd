"""The error tree of Burstline.

    BurstlineError
    ├── ClientError                 the caller can mend it; an OpenAI-shaped 4xx at the gateway
    │   ├── InvalidRequest          400  a field is wrong; names the field and the limit
    │   ├── ContextLengthExceeded   400  prompt + max_tokens over the window; carries the three numbers
    │   ├── Unauthenticated         401
    │   ├── PermissionRefused       403
    │   ├── NotFound                404
    │   ├── Conflict                409
    │   ├── PayloadTooLarge         413
    │   └── QuotaExceeded           429
    ├── Overloaded                  503  try again later; carries retry_after_s
    ├── Unavailable                 503  something we stand on is away
    ├── DeadlineExceeded            504
    ├── ProtocolError               bytes that are not one of our messages, or of an unknown version
    │   └── FencedOut               a publish was refused by the journal: another attempt owns the request
    └── EngineFault                 a broken invariant inside the engine; fails one request, never quietly

Every error has a stable `code` that travels (frames, broker replies, HTTP bodies). Messages never hold prompts or keys.
"""

from __future__ import annotations


class BurstlineError(Exception):
    """Base of all. `code` is stable and travels; `status` is the HTTP status at the gateway."""

    code: str = "internal_error"
    status: int = 500
    kind: str = "server_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ClientError(BurstlineError):
    """The caller can mend it."""

    code = "invalid_request"
    status = 400
    kind = "invalid_request_error"


class InvalidRequest(ClientError):
    """A field is missing, of the wrong type or out of its range."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and completion do not fit the model's window (all three in tokens)."""

    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, max_tokens: int, window: int, param: str = "messages") -> None:
        super().__init__(
            f"This model's context window is {window} tokens; the request has {prompt_tokens} prompt tokens and "
            f"asks for {max_tokens} more.",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.window = window


class Unauthenticated(ClientError):
    """No key, or one that is unknown, expired or revoked."""

    code = "invalid_api_key"
    status = 401
    kind = "authentication_error"


class PermissionRefused(ClientError):
    """The key is good but may not do this."""

    code = "permission_denied"
    status = 403
    kind = "permission_error"


class NotFound(ClientError):
    """No such model, request, entry or tenant."""

    code = "not_found"
    status = 404


class Conflict(ClientError):
    """The same name or idempotency key already stands for something else."""

    code = "conflict"
    status = 409


class PayloadTooLarge(ClientError):
    """The body is over the published limit (bytes)."""

    code = "payload_too_large"
    status = 413


class QuotaExceeded(ClientError):
    """A tenant's limit is reached."""

    code = "quota_exceeded"
    status = 429
    kind = "rate_limit_error"


class Overloaded(BurstlineError):
    """Accepting more would harm what was accepted. Retry after `retry_after_s` seconds."""

    code = "overloaded"
    status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(BurstlineError):
    """NATS, Postgres, the broker or every worker of a model is away."""

    code = "unavailable"
    status = 503


class DeadlineExceeded(BurstlineError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    status = 504


class ProtocolError(BurstlineError):
    """Bytes that are not one of our messages, or a version that this build does not speak."""

    code = "protocol_error"


class FencedOut(ProtocolError):
    """The journal refused a publish: its last sequence is not the one that this attempt knows."""

    code = "fenced_out"


class EngineFault(BurstlineError):
    """An invariant of the engine does not hold (NaN logits, a fold that was never accepted, a double free)."""

    code = "engine_fault"
