"""Grammars of requests, compiled for the model that this worker serves. Compiling happens in a thread."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from llguidance import LLTokenizer
from msgspec import UNSET, UnsetType

from services.gpu_worker.engine.grammar import Grammar
from services.gpu_worker.engine.requests import GenerateRequest
from shared.grammar import compile_grammar, read_tokens

KEPT: Final = 64
"""Compiled grammars that are kept: agents send the same few schemas again and again."""


class Grammars:
    """Of one model folder. Belongs to the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._turn = asyncio.Lock()
        self._tokens: LLTokenizer | None = None

    async def constrain(
        self, choices: Sequence[GenerateRequest], source: str | UnsetType, *, vocab: int
    ) -> Sequence[GenerateRequest]:
        """The choices of one request with its grammar; `vocab` = ids of the model. Raises GrammarRefused."""
        if source is UNSET:
            return choices
        grammar = await self._compiled(source, vocab)
        return [replace(choice, grammar=grammar) for choice in choices]

    async def _compiled(self, source: str, vocab: int) -> Grammar:
        async with self._turn:
            grammar = self._kept.get(source)
            if grammar is None:
                grammar = await asyncio.to_thread(self._compile, source, vocab)
                self._kept[source] = grammar
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(source)
            return grammar

    def _compile(self, source: str, vocab: int) -> Grammar:
        if self._tokens is None:
            self._tokens = read_tokens(self._folder, vocab)
        return Grammar(compile_grammar(source, self._tokens), self._tokens.eos_tokens)
