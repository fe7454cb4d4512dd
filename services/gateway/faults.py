"""Every error as OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Never a stack, a prompt or a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from shared.errors import BurstlineError, InvalidRequest, Overloaded
from shared.protocol.messages import Failure

T = TypeVar("T", bound=BaseModel)

_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_WORDS: Final = {
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
}
"""Faults that pydantic tells in words of Python."""


class RemoteFailure(BurstlineError):
    """A failure that another service reported; type, message and status arrive unchanged (FR-48)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, code=failure.code)
        self.status = failure.status if 400 <= failure.status <= 599 else 500
        self.kind = _KINDS.get(self.status, "server_error")
        self.retry_after_s = failure.retry_after_s


def body(error: BurstlineError) -> dict[str, object]:
    """The response body of an error."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def headers(error: BurstlineError) -> dict[str, str]:
    """Retry-After where the error says when."""
    retry = error.retry_after_s if isinstance(error, Overloaded | RemoteFailure) else None
    if retry is None and error.status in (429, 503):
        retry = 1
    found = {} if retry is None else {"retry-after": str(retry)}
    if error.status == 401:
        found["www-authenticate"] = "Bearer"
    return found


def validate(schema: type[T], value: Mapping[str, object]) -> T:
    """`value` as a `schema`.

    Raises:
        InvalidRequest: names the field by its path (`messages[2].content`).
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _invalid(error, value) from None


def _invalid(error: ValidationError, value: Mapping[str, object]) -> InvalidRequest:
    """The most telling fault of several: in a union it is the one about the kind that was meant."""
    faults = [
        (path_of(fault["loc"], value, missing=fault["type"] == "missing"), fault)
        for fault in error.errors(include_url=False, include_input=False, include_context=True)
    ]
    path, fault = max(faults, key=lambda pair: _telling(pair[0], pair[1]["type"]))
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, str(fault["ctx"]["discriminator"]).strip("'"))
    param = spell(path)
    if fault["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field: {param}", param=param, code="unknown_field")
    return InvalidRequest(f"{param}: {_WORDS.get(fault['type'], fault['msg'])}", param=param)


def _telling(path: Sequence[int | str], kind: str) -> tuple[int, bool, int]:
    """Of the kinds of a union the one that was meant fits deepest, then in its type, then over most items: a list stops
    at its first fault."""
    return len(path), not kind.endswith("_type"), path[-1] if path and isinstance(path[-1], int) else -1


def path_of(location: Sequence[int | str], value: object, *, missing: bool) -> tuple[int | str, ...]:
    """The part of pydantic's location that is a path in the data: union tags and type names are left out."""
    path: list[int | str] = []
    current: Any = value
    for part in location:
        in_list = isinstance(part, int) and isinstance(current, list) and part < len(current)
        in_object = isinstance(part, str) and isinstance(current, Mapping) and part in current
        if in_list or in_object:
            path.append(part)
            current = current[part]
    if missing:
        path.append(location[-1])
    return tuple(path)


def spell(path: Sequence[int | str]) -> str:
    """messages[2].content; at most 200 characters, since callers choose the names."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:200]
