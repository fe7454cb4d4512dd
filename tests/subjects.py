"""Subjects that only those listen on who stand for a whole service."""

from __future__ import annotations

from typing import Final

BROKER_CALLS: Final = "brk.v1.*"
"""Every call of a broker (`shared.protocol.subjects.broker`)."""
