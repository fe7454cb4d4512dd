"""The headers of a message as they came over the wire. Most are never asked for, so they are parsed when somebody does."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Final

_VERSION: Final = "NATS/1.0"
_NO_STATUS: Final = b"NATS/1.0\r\n"
_SERVERS: Final = "Nats-"


class Fields(Mapping[str, str]):
    """A header block as a mapping."""

    __slots__ = ("_block", "_found", "_own")

    def __init__(self, block: bytes, *, own: bool = False) -> None:
        """`own`: without what the server added."""
        self._block: Final = block
        self._own: Final = own
        self._found: dict[str, str] | None = None

    @property
    def has_status(self) -> bool:
        """Whether the server says something of its own here."""
        return not self._block.startswith(_NO_STATUS)

    def own(self) -> Fields:
        """As the sender gave them."""
        return Fields(self._block, own=True)

    def __getitem__(self, name: str) -> str:
        return self._parsed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def items(self) -> ItemsView[str, str]:
        return self._parsed().items()

    def __repr__(self) -> str:
        return repr(self._parsed())

    def _parsed(self) -> dict[str, str]:
        if self._found is None:
            found = parse_headers(self._block)
            self._found = dict(clean(found)) if self._own else found
        return self._found


def clean(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Headers as the sender gave them."""
    if isinstance(headers, Fields):
        return headers.own()
    return {name: value for name, value in headers.items() if not name.startswith(_SERVERS)}


def parse_headers(block: bytes) -> dict[str, str]:
    """A header block as a dictionary; the server's own status, which stands in the first line, as Status and
    Description. A line that is no field is passed over."""
    first, *lines = block.decode("utf-8", "replace").split("\r\n")
    found: dict[str, str] = {}
    status, _, description = first.removeprefix(_VERSION).strip().partition(" ")
    if status:
        found["Status"] = status
    if description:
        found["Description"] = description.strip()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found
