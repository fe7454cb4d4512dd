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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from shared.errors import InvalidRequest

_OPEN: Final = "\ue0f0"
_CLOSE: Final = "\ue0f1"
_EDGE: Final = re.compile(f"[{_OPEN}{_CLOSE}]")


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a rendered prompt: plain text, or one control token (`token` = its id)."""

    text: str
    token: int | None


class ControlTokens:
    """The control tokens of a vocabulary: text -> id.

    Vocabularies have thousands of them, most with one beginning (`<|reserved_special_token_0|>`), and callers choose the
    text: what is looked for at one place of it must not grow with their number.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.ids: Final = dict(tokens)
        self._whole: Final = re.compile(_tree(tokens))
        self._beginnings: Final = frozenset(text[:cut] for text in tokens for cut in range(1, len(text)))
        self._ends: Final = frozenset(text[cut:] for text in tokens for cut in range(1, len(text)))
        self._longest_part: Final = max(map(len, self._beginnings), default=0)

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

    def split_both(self, text: str, other: str) -> tuple[list[Segment], list[Segment]]:
        """Both cut. Most often `other` is how `text` begins: its segments are the same then up to its end, unless that lies
        inside a control token."""
        segments = self.split(text)
        left, shared = len(other) if text.startswith(other) else 0, list[Segment]()
        for segment in segments:
            if not left:
                break
            if len(segment.text) > left:
                if segment.token is not None:
                    return segments, self.split(other)
                segment = Segment(text=segment.text[:left], token=None)
            shared.append(segment)
            left -= len(segment.text)
        return segments, shared if shared else self.split(other)

    def replace(self, text: str, hide: Callable[[str], str]) -> str:
        """`text` with what a shield hides replaced: whole tokens, then the longest beginning of one at the text's end and
        the longest end of one at its beginning."""
        text = self._whole.sub(lambda match: hide(match[0]), text)
        parts = range(min(len(text), self._longest_part), 0, -1)
        if found := next((size for size in parts if text[-size:] in self._beginnings), 0):
            text = text[:-found] + hide(text[-found:])
        parts = range(min(len(text), self._longest_part), 0, -1)
        if found := next((size for size in parts if text[:size] in self._ends), 0):
            text = hide(text[:found]) + text[found:]
        return text


def _tree(texts: Iterable[str]) -> str:
    """A regular expression for the longest of `texts` at a place, which looks at each character of it once."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    if not following:
        return r"(?!)"
    return _branches(following)


def _branches(following: Mapping[str, Sequence[str]]) -> str:
    branches = [re.escape(first) + _rest(rests) for first, rests in following.items()]
    return branches[0] if len(branches) == 1 else "(?:" + "|".join(branches) + ")"


def _rest(rests: Sequence[str]) -> str:
    """What comes after a character that `rests` share; the empty one of them may end there."""
    least, most = min(rests), max(rests)  # what these two share, all do
    size = next(
        (at for at, pair in enumerate(zip(least, most, strict=False)) if pair[0] != pair[1]), len(least)
    )
    shared = least[:size]
    following: dict[str, list[str]] = {}
    for rest in rests:
        if len(rest) > len(shared):
            following.setdefault(rest[len(shared)], []).append(rest[len(shared) + 1 :])
    if not following:
        return re.escape(shared)
    more = _branches(following)
    return re.escape(shared) + (f"(?:{more})?" if shared in rests else more)


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
        text = _EDGE.sub(lambda match: self._hide(match[0]), text)  # first: later they are ours alone
        return self._control.replace(text, self._hide)

    def _hide(self, text: str) -> str:
        self._hidden.append(text)
        return f"{_OPEN}{self._nonce}:{len(self._hidden) - 1}{_CLOSE}"

    def uncover(self, rendered: str) -> list[Segment]:
        """The rendered prompt as segments, with the callers' text restored. Raises what `uncover_both` raises."""
        return self._restored(self._control.split(rendered))

    def uncover_both(self, rendered: str, other: str) -> tuple[list[Segment], list[Segment]]:
        """The same of two renderings, of which the second most often begins the first.

        Raises:
            InvalidRequest: the template changed a mark (cut it or changed its case), so what it stands for is lost.
        """
        segments, others = self._control.split_both(rendered, other)
        return self._restored(segments), self._restored(others)

    def _restored(self, segments: list[Segment]) -> list[Segment]:
        if not self._hidden:
            return segments
        return [
            segment if segment.token is not None else Segment(text=self._restore(segment.text), token=None)
            for segment in segments
        ]

    def _restore(self, text: str) -> str:
        mark = re.compile(f"{_OPEN}{self._nonce}:([0-9]+){_CLOSE}")
        if _EDGE.search(mark.sub("", text)):
            raise InvalidRequest(
                "the chat template cannot take control tokens inside a message", param="messages"
            )
        return mark.sub(lambda match: self._hidden[int(match[1])], text)
