"""The n-gram drafter: what followed last time after the same few tokens. Needs no model, so any trunk can have it.

Looked up in this order; the most recent occurrence wins among matches of one length:

    1. the longest match (2 to 5 tokens) in the stream's own prompt and completion, when it is 5 long
    2. a match of 5 in what finished streams of the same namespace said
    3. the longest match in the stream itself, when it is 2 to 4 long

A draft copies on into itself where the earlier text ends, as a period would. Drafts are verified like any others, so an
index may forget whatever it likes: acceptance depends on what else ran in the namespace, tokens never do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeAlias

from torch import Tensor

MIN_MATCH: Final = 2
MAX_MATCH: Final = 5
"""Shorter matches are chance, longer ones say nothing that five tokens do not."""
MOST_TRIED: Final = 32
"""Places looked at for one proposal: the newest ones, since text repeats what it said lately."""

Tokens: TypeAlias = tuple[int, ...]


class SuffixIndex:
    """Tokens of one stream, and for each run of two of them where it was followed by another token, newest first.

    One dict entry at most and two numbers a token; a stream is bounded by the context window, and the index goes with it.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._newest: dict[int, int] = {}
        self._older: list[int] = []
        """For each index: the last one before it that stands after the same two tokens, 0 without any."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The newest run of them is no match of itself: it is entered when its successor comes."""
        known, newest, older = self.tokens, self._newest, self._older
        for token in tokens:
            end = len(known)
            if end < MIN_MATCH:
                older.append(0)
            else:
                pair = _pair(known)
                older.append(newest.get(pair, 0))
                newest[pair] = end
            known.append(token)

    def suffix(self, length: int) -> Tokens:
        """The newest tokens."""
        return tuple(self.tokens[-length:])

    def match(self, least: int, most: int) -> int | None:
        """Index of the token after an earlier occurrence of the newest `least` to `most` tokens: the longest match, the
        latest of equal ones, among the newest `MOST_TRIED` places where the last two tokens stood."""
        best, found = least - 1, None
        place = self._newest.get(_pair(self.tokens), 0) if len(self.tokens) >= MIN_MATCH else 0
        for _ in range(MOST_TRIED):
            if not place or best >= most:
                break
            length = self._alike(place, most)
            if length > best:
                best, found = length, place
            place = self._older[place]
        return found

    def _alike(self, place: int, most: int) -> int:
        """Tokens before index `place` that are the newest ones, at most `most`."""
        end = len(self.tokens)
        length = MIN_MATCH
        while length < min(most, place) and self.tokens[place - length - 1] == self.tokens[end - length - 1]:
            length += 1
        return length

    def follow(self, start: int, count: int) -> list[int]:
        """`count` tokens from index `start` on, the drafts themselves where the stream ends."""
        drafts: list[int] = []
        for index in range(start, start + count):
            known = len(self.tokens)
            drafts.append(self.tokens[index] if index < known else drafts[index - known])
        return drafts


def _pair(tokens: Sequence[int]) -> int:
    """The last two ids as one number, which the garbage collector need not follow as it would a tuple."""
    return tokens[-2] << 32 | tokens[-1]


class NamespaceIndex:
    """What finished streams of each namespace said, by chain root: no root ever sees another's (C4).

    Bounded: at most `roots` namespaces of `runs` runs each, the least recently used go first. A namespace that floods
    its own index pushes nobody else's runs out.
    """

    def __init__(self, *, roots: int = 32, runs: int = 4096) -> None:
        self._most_roots = roots
        self._most_runs = runs
        self._roots: OrderedDict[bytes, OrderedDict[Tokens, tuple[Tokens, int]]] = OrderedDict()

    def learn(self, root: bytes, tokens: Sequence[int], start: int) -> None:
        """Enter a finished stream: every run of 5 that a token from index `start` on follows."""
        runs = self._roots.setdefault(root, OrderedDict())
        self._roots.move_to_end(root)
        kept = tuple(tokens[max(0, start - MAX_MATCH) :])
        for index in range(MAX_MATCH, len(kept)):
            run = kept[index - MAX_MATCH : index]
            runs[run] = (kept, index)
            runs.move_to_end(run)
        while len(runs) > self._most_runs:
            runs.popitem(last=False)
        while len(self._roots) > self._most_roots:
            self._roots.popitem(last=False)

    def find(self, root: bytes, run: Tokens, count: int) -> list[int]:
        """Up to `count` tokens that followed `run` in this namespace, [] when it is not known."""
        runs = self._roots.get(root)
        found = runs.get(run) if runs is not None else None
        if runs is None or found is None:
            return []
        self._roots.move_to_end(root)
        runs.move_to_end(run)
        tokens, index = found
        return list(tokens[index : index + count])

    def __len__(self) -> int:
        """Runs kept, of all namespaces."""
        return sum(len(runs) for runs in self._roots.values())


class NgramDrafter:
    """The index of one stream, and the namespace's beside it."""

    def __init__(self, prompt: Sequence[int], root: bytes, shared: NamespaceIndex) -> None:
        self._own = SuffixIndex(prompt)
        self._root = root
        self._shared = shared

    def observe(self, start: int, tokens: Sequence[int], hiddens: Tensor) -> None:
        """See `Drafter.observe`; hiddens say nothing here."""
        self._own.extend(tokens)

    def propose(self, k: int) -> list[int]:
        """Up to `k` drafts after the newest observed token; often none, which costs nothing."""
        if k < 1:
            return []
        own = self._own.match(MAX_MATCH, MAX_MATCH)
        if own is None:
            shared = self._shared.find(self._root, self._own.suffix(MAX_MATCH), k)
            if shared:
                return shared
            own = self._own.match(MIN_MATCH, MAX_MATCH - 1)
        return [] if own is None else self._own.follow(own, k)
