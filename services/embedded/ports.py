"""Loopback ports."""

from __future__ import annotations

import socket
from typing import Final

from services.embedded.faults import PortTaken

LOOPBACK: Final = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens on now. Another process may still take it first: the caller tries again."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def require_free(port: int, variable: str) -> None:
    """Raise PortTaken, naming the `variable` that chose it, when `port` cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise PortTaken(
                f"port {port} is taken ({error.strerror}). Stop what uses it, or set {variable} to another port "
                "(0 takes any free one)."
            ) from error


def greeting(port: int) -> bytes:
    """What a server on `port` says first (up to 4 KiB); b"" when nobody listens or says anything."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0) as connection:
            return connection.recv(4096)
    except OSError:
        return b""
