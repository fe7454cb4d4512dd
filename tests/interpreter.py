"""Triton's interpreter, made quicker for tests: what it does anew at every call is done once.

At each launch, and at each call of one device function by another, the interpreter looks through `triton.language` for what to
replace, which is half the time of a kernel of a few dozen rows. What it replaces depends on the modules that a function sees
and on nothing else, so it is found once for each such set; within a launch there is nothing to replace again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

Change: TypeAlias = tuple[Any, str, Any, Any]
"""(owner, name, what was there, what the interpreter puts there)."""


def quicken(interpreter: ModuleType) -> None:
    """Let `triton.runtime.interpreter` look once for what it replaces. Idempotent."""
    if not isinstance(interpreter._patch_lang, _Patches):
        interpreter._patch_lang = _Patches(interpreter)


class _Patches:
    """In the place of `_patch_lang`, and its own scope. For one launch at a time, as the interpreter itself is."""

    def __init__(self, interpreter: ModuleType) -> None:
        self._patch: Callable[[FunctionType], Any] = interpreter._patch_lang
        self._missing: object = interpreter._MISSING
        self._modules = (interpreter.tl, interpreter.tl.core)
        self._seen: dict[FunctionType, frozenset[str]] = {}
        self._found: dict[frozenset[str], list[Change]] = {}
        self._active: list[frozenset[str]] = []

    def __call__(self, function: FunctionType) -> _Patches:
        """Replace what `function` needs, if this launch has not."""
        seen = self._seen.get(function)
        if seen is None:
            names = (value.__name__ for value in function.__globals__.values() if value in self._modules)
            seen = self._seen[function] = frozenset(names)
        if seen not in self._active:
            if seen not in self._found:
                self._find(seen, function)
            self._set(seen)
            self._active.append(seen)
        return self

    def _find(self, seen: frozenset[str], function: FunctionType) -> None:
        """Let the interpreter replace, from a language as it is, and keep what it did."""
        active = list(self._active)
        self.restore()
        scope = self._patch(function)
        self._found[seen] = [(owner, name, old, getattr(owner, name)) for owner, name, old in scope._changes]
        scope.restore()
        for one in active:
            self._set(one)
        self._active = active

    def _set(self, seen: frozenset[str]) -> None:
        for owner, name, _, new in self._found[seen]:
            setattr(owner, name, new)

    def restore(self) -> None:
        """The launch is over: the language is as it was."""
        while self._active:
            for owner, name, old, _ in reversed(self._found[self._active.pop()]):
                if old is not self._missing:
                    setattr(owner, name, old)
                elif name in vars(owner):
                    delattr(owner, name)
