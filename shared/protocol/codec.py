"""Bytes <-> message. msgpack of [name, version, body]; an unknown name or version is an error, never a guess."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from shared.errors import ProtocolError
from shared.protocol import messages
from shared.protocol.messages import Message

M = TypeVar("M", bound=Message)


class _Envelope(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    name: str
    version: int
    body: msgspec.Raw


def _concrete(base: type[Message]) -> list[type[Message]]:
    found: list[type[Message]] = []
    for child in base.__subclasses__():
        found.extend(_concrete(child) or [child])
    return found


MESSAGES: Final[dict[str, type[Message]]] = {kind.__name__: kind for kind in _concrete(messages.Message)}
"""Every message of the protocol by its wire name."""

_encoder: Final = msgspec.msgpack.Encoder()
_envelope_decoder: Final = msgspec.msgpack.Decoder(_Envelope)
_decoders: Final = {name: msgspec.msgpack.Decoder(kind) for name, kind in MESSAGES.items()}


def encode(message: Message) -> bytes:
    """The wire bytes of a message."""
    body = msgspec.Raw(_encoder.encode(message))
    return _encoder.encode(_Envelope(type(message).__name__, type(message).VERSION, body))


def decode(data: bytes) -> Message:
    """The message that `data` holds.

    Raises:
        ProtocolError: not our envelope, an unknown name or version, or a body that does not fit its type.
    """
    try:
        envelope = _envelope_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a Burstline message: {error}") from error
    kind = MESSAGES.get(envelope.name)
    if kind is None:
        raise ProtocolError(f"unknown message {envelope.name[:64]!r}")
    if envelope.version != kind.VERSION:
        raise ProtocolError(
            f"{envelope.name} version {envelope.version} is not spoken here (this build speaks {kind.VERSION})"
        )
    try:
        decoded: Message = _decoders[envelope.name].decode(envelope.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad {envelope.name}: {error}") from error
    return decoded


def decode_as(kind: type[M], data: bytes) -> M:
    """Like `decode`, and the message must be a `kind`.

    Raises:
        ProtocolError: also when it is another message.
    """
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message
