"""Keeps text that callers wrote from becoming control tokens.

The vocabulary's control tokens (`<|im_end|>`, `<tool_call>`, …) mean something only where the chat template writes them.
Before rendering, every control token's text inside a caller's string is replaced by a mark of private-use characters with
a fresh random number; after rendering, control tokens are searched outside the marks alone, and the marks turn back into
the caller's text, which is then encoded as plain text.

A control token could also be put together across a border, from the end of one string and the beginning of another. So
a control token's proper beginning at the end of a string, and its proper end at the beginning, are marked as well. What
is left is a token of which a caller's whole string is the middle; a template that builds one so does it on purpose.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shared.errors import InvalidRequest

_OPEN: Final = "\ue0f0"
_CLOSE: Final = "\ue0f1"
_EDGE: Final = re.compile(f"[{_OPEN}{_CLOSE}]")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a rendered prompt: plain text, or one control token (`token` = its id)."""

    text: str
    token: int | None


class ControlTokens:
    """The control tokens of a vocabulary: text -> id."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.ids: Final = dict(tokens)
        longest_first = sorted(tokens, key=len, reverse=True)
        self._whole = _alternatives(longest_first)
        beginnings = {text[:cut] for text in tokens for cut in range(1, len(text))}
        ends = {text[cut:] for text in tokens for cut in range(1, len(text))}
        self._beginning = _alternatives(beginnings, after=r"\Z")
        self._end = _alternatives(ends, before=r"\A")

    def split(self, text: str) -> list[Segment]:
        """`text` cut at its control tokens; the longest wins where several begin at one place."""
        segments: list[Segment] = []
        position = 0
        for match in self._whole.finditer(text):
            if match.start() > position:
                segments.append(Segment(text=text[position : match.start()], token=None))
            segments.append(Segment(text=match[0], token=self.ids[match[0]]))
            position = match.end()
        if position < len(text):
            segments.append(Segment(text=text[position:], token=None))
        return segments

    def patterns(self) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
        """What a shield replaces: whole tokens, beginnings at a string's end, ends at a string's beginning."""
        return self._whole, self._beginning, self._end


def _alternatives(texts: Iterable[str], *, before: str = "", after: str = "") -> re.Pattern[str]:
    ordered = sorted(texts, key=len, reverse=True)
    if not ordered:
        return re.compile(r"(?!)")
    return re.compile(before + "(?:" + "|".join(map(re.escape, ordered)) + ")" + after)


class Shield:
    """Marks of one request. `cover` before rendering, `uncover` after it."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._nonce = secrets.token_hex(8)
        self._hidden: list[str] = []

    def cover(self, value: object) -> object:
        """`value` (JSON) with the control tokens of all its strings, keys included, replaced by marks."""
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, list | tuple):
            return [self.cover(item) for item in value]
        if isinstance(value, Mapping):
            return {self._cover_text(str(name)): self.cover(item) for name, item in value.items()}
        return value

    def _cover_text(self, text: str) -> str:
        for pattern in (_EDGE, *self._control.patterns()):
            text = pattern.sub(self._hide, text)  # the edges come first: later they are ours alone
        return text

    def _hide(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"{_OPEN}{self._nonce}:{len(self._hidden) - 1}{_CLOSE}"

    def uncover(self, rendered: str) -> list[Segment]:
        """The rendered prompt as segments, with the callers' text restored.

        Raises:
            InvalidRequest: the template changed a mark (cut it or changed its case), so what it stands for is lost.
        """
        return [
            Segment(
                text=segment.text if segment.token is not None else self._restore(segment.text),
                token=segment.token,
            )
            for segment in self._control.split(rendered)
        ]

    def _restore(self, text: str) -> str:
        if not self._hidden:
            return text
        mark = re.compile(f"{_OPEN}{self._nonce}:([0-9]+){_CLOSE}")
        if _EDGE.search(mark.sub("", text)):
            raise InvalidRequest(
                "the chat template cannot take control tokens inside a message", param="messages"
            )
        return mark.sub(lambda match: self._hidden[int(match[1])], text)
