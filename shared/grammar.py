"""Grammars that a completion has to follow: how one is written, what it may cost, and the vocabulary that it is walked over.

A grammar travels as its source, in llguidance's dialect of Lark with JSON schemas inside (docs/adr/0016). The gateway writes
it and tries it, so that a bad schema is refused before the queue; each worker compiles it for itself. What a compiled one
allows after a prefix is a function of the source and of the prefix alone.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.control import BEGIN_CALL, END_CALL, split_added
from shared.errors import InvalidRequest
from shared.panics import is_panic

LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    precompute_large_lexemes=True,
    verbose_errors=False,
)
"""Counts and no seconds, so that a grammar is refused on every machine or on none."""

SPACES: Final[Mapping[str, Any]] = {"whitespace_flexible": True, "whitespace_pattern": "( |\\n[ \\t]{0,16})"}
"""Between the parts of a JSON value: a space, or a new line and its indentation. Without a bound a model that only adds space
fills its budget with it."""
BREAK: Final = "BREAK: /\\n{0,4}/"
"""A rule: what may stand between two calls, and after a thinking block."""
_BRACKETS: Final = re.compile(r"<.*>", re.DOTALL)
"""What the library takes for a control token by its look. A piece of text that looks so, as Gemma's <b>, is one to it where it is
no added token; it is spelled in letters then where a grammar forces that text, and free elsewhere."""
_FILE_FAULTS: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_SCHEMA_FAULT: Final = "failed to compile JSON schema: "
_REASON: Final = "error: "


class GrammarRefused(InvalidRequest):
    """A grammar that cannot be compiled; the message says why, in one line and without the grammar."""

    code = "grammar_refused"


def read_tokens(folder: Path, size: int) -> LLTokenizer:
    """The vocabulary of a model folder, `size` ids. Raises GrammarRefused: its kind of tokenizer cannot be constrained."""
    try:
        spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        text, control = split_added(spec)
        marked = [{**token, "special": True} for token in control]
        spec["added_tokens"] = marked + [token for token in text if not _BRACKETS.fullmatch(token["content"])]
        return LLTokenizer(json.dumps(spec), n_vocab=size)
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, _FILE_FAULTS) or is_panic(error):
            raise GrammarRefused(
                f"the model's tokenizer cannot be constrained: {_line(str(error))}"
            ) from error
        raise


class FolderTokens:
    """The vocabulary of a model folder: read once, by whoever asks first, and the others wait for that. For any thread.

    Reading holds the interpreter, 1.3 to 1.9 s for 150,000 ids, so a process reads before it serves (`fault`).
    """

    def __init__(self, folder: Path, size: int) -> None:
        """`size` = ids of the model."""
        self._folder: Final = folder
        self._size: Final = size
        self._lock: Final = threading.Lock()
        self._found: LLTokenizer | str | None = None  # a text is why it cannot be read

    def get(self) -> LLTokenizer:
        """Raises GrammarRefused, the same whenever it is asked."""
        found = self._read()
        if isinstance(found, str):
            raise GrammarRefused(found)
        return found

    def fault(self) -> str | None:
        """Why no grammar can be followed; null = all is well."""
        found = self._read()
        return found if isinstance(found, str) else None

    def _read(self) -> LLTokenizer | str:
        with self._lock:
            if self._found is None:
                try:
                    self._found = read_tokens(self._folder, self._size)
                except GrammarRefused as error:
                    self._found = error.message
            return self._found


def token(number: int) -> str:
    """A control token, which no text is taken for."""
    return f"<[{number}]>"


def json_value(schema: Mapping[str, Any], *, spaces: Mapping[str, Any] = SPACES) -> str:
    """A JSON value of a schema, whatever the schema says of spaces itself."""
    return "%json " + json.dumps({**schema, "x-guidance": spaces})


def call_rules(
    number: int,
    name: str,
    arguments: Mapping[str, Any],
    marks: Mapping[str, int],
    *,
    spaces: Mapping[str, Any] = SPACES,
) -> list[str]:
    """Rules of `call<number>`, a call of the tool `name` as the models' templates write one; `marks` = ids of control tokens."""
    head = json.dumps('\n{"name": ' + json.dumps(name) + ', "arguments": ')
    begin, end = token(marks[BEGIN_CALL]), token(marks[END_CALL])
    return [
        f'call{number}: {begin} {head} arguments{number} "}}\\n" {end}',
        f"arguments{number}: {json_value(arguments, spaces=spaces)}",
    ]


def compile_grammar(source: str, tokens: LLTokenizer) -> LLMatcher:
    """A matcher before its first token. Raises GrammarRefused, also where no first token is found: `{"$ref": "#"}` compiles."""
    matcher = LLMatcher(tokens, source, log_level=0, limits=LIMITS)
    first = matcher.deep_copy()
    if not matcher.is_error():
        first.compute_bitmask()
    if matcher.is_error():
        raise GrammarRefused(_line(matcher.get_error()))
    if first.is_error():
        raise GrammarRefused(
            f"no answer can begin (a schema that is only itself?): {_line(first.get_error())}"
        )
    return matcher


def _line(error: str) -> str:
    """The part of a compiler's message that a caller can use: the first line, and where it only opens a drawing of a faulty
    pattern, the reason below that."""
    lines = (error.partition(_SCHEMA_FAULT)[2] or error).splitlines()
    said = lines[0] if lines else "no reason was given"
    if said.endswith(":"):
        said = " ".join([said, *(line.removeprefix(_REASON) for line in lines if line.startswith(_REASON))])
    return said[:300]
