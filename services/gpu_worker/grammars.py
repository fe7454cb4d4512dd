"""Grammars of requests, compiled for the model that this worker serves. Compiling happens in a thread."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import UNSET, UnsetType

from services.gpu_worker.engine.grammar import Grammar
from services.gpu_worker.engine.requests import GenerateRequest
from shared.grammar import FolderTokens, compile_grammar

KEPT: Final = 64
"""Compiled grammars that are kept: agents send the same few schemas again and again."""


class Grammars:
    """Of one model folder. Belongs to the event loop."""

    def __init__(self, folder: Path, vocab: int) -> None:
        """`vocab` = ids of the model."""
        self._tokens = FolderTokens(folder, vocab)
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._turn = asyncio.Lock()

    async def ready(self) -> str | None:
        """Read the vocabulary, which holds the interpreter: before there is work. Why no grammar can be followed, if so."""
        return await asyncio.to_thread(self._tokens.fault)

    async def constrain(
        self, choices: Sequence[GenerateRequest], source: str | UnsetType
    ) -> Sequence[GenerateRequest]:
        """The choices of one request with its grammar. Raises GrammarRefused."""
        if source is UNSET:
            return choices
        grammar = await self._compiled(source)
        return [replace(choice, grammar=grammar) for choice in choices]

    async def _compiled(self, source: str) -> Grammar:
        async with self._turn:
            grammar = self._kept.get(source)
            if grammar is None:
                grammar = await asyncio.to_thread(self._compile, source)
                self._kept[source] = grammar
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(source)
            return grammar

    def _compile(self, source: str) -> Grammar:
        tokens = self._tokens.get()
        return Grammar(compile_grammar(source, tokens), tokens.eos_tokens)
