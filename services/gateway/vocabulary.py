"""A model folder's vocabulary: text -> ids, and what each id stands for in bytes (`spelling` tells which kinds are served).

Encoding is the tokenizers library's, on the text between control tokens: those are never looked for in a caller's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from services.gateway.shield import ControlTokens, Segment
from services.gateway.spelling import spelling
from shared.control import base_vocabulary, split_added
from shared.panics import is_panic

_UNREACHABLE: Final = "\ue0f2"
"""What a control token is called in the vocabulary that encodes plain text, with its id behind it."""


class ModelFolderError(ValueError):
    """A model folder cannot be served; the message says which file and why."""


class Vocabulary:
    """Encodes segments of a prompt and knows every token's bytes. Safe to use from several threads."""

    def __init__(self, spec: dict[str, Any], *, size: int) -> None:
        """`spec` is the content of a tokenizer.json; `size` the model's vocabulary (ids in 0..size-1)."""
        added = spec.get("added_tokens") or []
        _check(added)
        self.spelling: Final = spelling(spec.get("decoder"))
        base = base_vocabulary(spec["model"])
        words, control = split_added(spec)
        self.size: Final = size
        self.control: Final = ControlTokens({token["content"]: token["id"] for token in control})
        self.special_ids: Final = frozenset(token["id"] for token in added if token["special"])
        self.control_text: Final[dict[int, str]] = {token["id"]: token["content"] for token in control}
        self.apart: Final = self.special_ids.union(self.control_text)
        """Ids of tokens that may stand for something else than their text."""
        self.opening_ids: Final = _opening_ids(spec.get("post_processor"))
        """What the folder's tokenizer puts before a raw text (<s>, <|begin_of_text|>); a chat template writes its own."""
        plain = {**spec, "added_tokens": words, "truncation": None, "padding": None}
        plain["model"] = _without(spec["model"], self.control.ids)
        self._plain = _tokenizer(plain)
        inner = _never_first(spec.get("pre_tokenizer"))
        self._inner = self._plain if inner is None else _tokenizer({**plain, "pre_tokenizer": inner})
        self._learnt: Final[dict[str, list[int]]] = {}
        texts = [
            (text, token) for text, token in base.items() if token < size and token not in self.control_text
        ]
        self._bytes = _table(size, ((token, self.spelling.data(text)) for text, token in texts))
        self._first = {
            token: self.spelling.first(text)
            for text, token in texts
            if self.spelling.mark and self.spelling.mark in text
        }
        for token, text in self.control_text.items():
            if token < size:
                self._bytes[token] = text.encode()
        self.longest: Final = max(map(len, self._bytes), default=1) or 1
        """Bytes of the longest token: no text of n bytes has fewer than n / longest tokens."""

    @classmethod
    def load(cls, file: Path, *, size: int) -> Vocabulary:
        """Read a tokenizer.json. Raises ModelFolderError."""
        try:
            spec = json.loads(file.read_text(encoding="utf-8"))
            return cls(spec, size=size)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelFolderError(f"{file}: not laid out as a tokenizer.json: {error!r}"[:500]) from error
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{file}: {error}") from error

    def encode(self, segments: Sequence[Segment], *, begins: bool = True) -> list[int]:
        """Ids of a rendered prompt: control tokens as their ids, the rest as plain text. `begins`: the first segment is where
        the whole text begins, which some vocabularies mark."""
        ids: list[int] = []
        for place, segment in enumerate(segments):
            if segment.token is not None:
                ids.append(segment.token)
            elif begins and place == 0:
                ids.extend(self._plain.encode(segment.text, add_special_tokens=False).ids)
            else:
                ids.extend(self._learnt.get(segment.text) or self._encode(segment.text))
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def learn(self, texts: Iterable[str]) -> None:
        """Remember the ids of the plain text in `texts`, which a chat template writes into every prompt. Before anything is
        encoded: what callers write is remembered nowhere."""
        plain = {part.text for text in texts for part in self.control.split(text) if part.token is None}
        self._learnt.update((text, self._encode(text)) for text in plain)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; b"" for an id that no token has."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def first_bytes(self, token: int) -> bytes:
        """The same for the first token of a whole text."""
        found = self._first.get(token)
        return self.token_bytes(token) if found is None else found


def _tokenizer(spec: Mapping[str, Any]) -> Tokenizer:
    """The library's tokenizer. Raises ValueError.

    The library raises bare exceptions, and panics where it did not foresee a fault; no other handler here would tell which
    file it was.
    """
    try:
        return Tokenizer.from_str(json.dumps(spec))
    except Exception as error:
        raise ValueError(_line(f"the tokenizers library refuses it: {error}")) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(_line(f"the tokenizers library fails on it: {error}")) from error


def _line(text: str) -> str:
    """One line of a message of the library's."""
    return " ".join(text.split())[:500]


def _check(added: Iterable[Mapping[str, Any]]) -> None:
    for token in added:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise ValueError(f"added token {token['content']!r} with {flag} is not supported")


def _without(model: Mapping[str, Any], control: Mapping[str, int]) -> dict[str, Any]:
    """`model` with its control tokens out of reach. BPE comes to a token by merges, which no control token has; Unigram, and
    BPE that looks whole words up, would find it by its text."""
    if model.get("type") == "BPE" and not model.get("ignore_merges"):
        return dict(model)

    def name(text: str) -> str:
        return f"{_UNREACHABLE}{control[text]}{_UNREACHABLE}" if text in control else text

    vocab, changed = model["vocab"], dict(model)
    if isinstance(vocab, Mapping):
        changed["vocab"] = {name(text): token for text, token in vocab.items()}
    else:
        changed["vocab"] = [[name(text), score] for text, score in vocab]
    if model.get("unk_token") is not None:
        changed["unk_token"] = name(model["unk_token"])
    return changed


def _never_first(pre_tokenizer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The pre-tokenizer for text that is not the beginning; None = it is the same there."""
    if not pre_tokenizer:
        return None
    if pre_tokenizer["type"] == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
        return {**pre_tokenizer, "prepend_scheme": "never"}
    if pre_tokenizer["type"] == "Sequence":
        parts = [_never_first(part) for part in pre_tokenizer["pretokenizers"]]
        if any(parts):
            kept = zip(parts, pre_tokenizer["pretokenizers"], strict=True)
            return {**pre_tokenizer, "pretokenizers": [new or old for new, old in kept]}
    return None


def _opening_ids(post_processor: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Of the special tokens that a template of the post-processor puts before a single text."""
    if not post_processor:
        return ()
    if post_processor["type"] == "Sequence":
        return next(filter(None, map(_opening_ids, post_processor["processors"])), ())
    ids: list[int] = []
    for part in post_processor.get("single", ()) if post_processor["type"] == "TemplateProcessing" else ():
        if "SpecialToken" not in part:
            break
        ids.extend(post_processor["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    return tuple(ids)


def _table(size: int, known: Iterable[tuple[int, bytes]]) -> list[bytes]:
    table = [b""] * size
    for token, data in known:
        table[token] = data
    return table
