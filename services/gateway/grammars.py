"""What a caller asks an answer to look like -> the grammar that its tokens have to follow (shared/grammar.py).

    response_format               the answer is one JSON value of a schema; with tools on offer it may be calls instead
    tool_choice required, a name  the answer is one or more calls of the tools, or one of the named tool
    strict tools                  text as the model likes, and a call that is begun is one of a tool, with its arguments

Arguments of a strict tool follow its schema, those of another are any object. A thinking block before the answer is free, if
the prompt opens one or the template knows of them. Knows the template's spelling of a call; knows no queue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from services.gateway.config import GatewaySettings
from services.gateway.model import ServedModel
from services.gateway.schemas.chat import ChatRequest, NamedChoice
from services.gateway.schemas.fields import GenerationFields, JsonSchemaFormat
from shared.errors import InvalidRequest
from shared.grammar import BREAK, GrammarRefused, call_rules, compile_grammar, json_value, token

_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a request's fields ask for. `answer`: a JSON value of this schema; `calls`: name and schema of the arguments of
    each tool that may be called; `free`: text is allowed beside calls; `one`: exactly one call."""

    answer: tuple[str, Mapping[str, Any]] | None = None  # where it stands in the body, and the schema
    calls: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()  # where, name, schema
    free: bool = False
    one: bool = False

    def schemas(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Each schema with the path of its field."""
        answers = [self.answer] if self.answer is not None else []
        return [*answers, *((param, schema) for param, _, schema in self.calls)]


def wanted(fields: GenerationFields, tools: object) -> Wanted | None:
    """What has to be followed; `tools` as the caller spelt them. None = nothing. Raises InvalidRequest."""
    answer = _answer(fields)
    if not isinstance(fields, ChatRequest) or not fields.offers_tools:
        return Wanted(answer=answer) if answer is not None else None
    calls = _calls(tools)
    choice = fields.tool_choice
    if isinstance(choice, NamedChoice):
        named = tuple(call for call in calls if call[1] == choice.function.name)
        if not named:
            raise InvalidRequest(
                "tool_choice names a tool that is not offered", param="tool_choice.function.name"
            )
        return Wanted(calls=named[:1], one=True)
    if choice == "required":
        return Wanted(calls=calls)
    if answer is not None:
        return Wanted(answer=answer, calls=calls)
    strict = any(tool.function.strict for tool in fields.tools or ())
    return Wanted(calls=calls, free=True) if strict else None


def _answer(fields: GenerationFields) -> tuple[str, Mapping[str, Any]] | None:
    form = fields.response_format
    if form is None or form.type == "text":
        return None
    if isinstance(form, JsonSchemaFormat):
        schema = form.json_schema.schema_
        return "response_format.json_schema.schema", _ANY_OBJECT if schema is None else schema
    return "response_format", _ANY_OBJECT


def _calls(tools: object) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
    calls = []
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool["function"]
        schema = _ANY_OBJECT
        if function.get("strict"):
            schema = {"type": "object", **(function.get("parameters") or _NO_ARGUMENTS)}
        calls.append((f"tools[{place}].function.parameters", str(function["name"]), schema))
    return tuple(calls)


def check_wanted(fields: GenerationFields, model: ServedModel) -> None:
    """Fields that leave a grammar no way to its end. Raises InvalidRequest."""
    if fields.ignore_eos or not model.stop_ids:
        raise InvalidRequest(
            "an answer that follows a grammar ends, and needs a token for that", param="ignore_eos"
        )
    if fields.allowed_token_ids is not None:
        raise InvalidRequest(
            "allowed_token_ids may forbid what response_format or tools ask for: give one of them",
            param="allowed_token_ids",
        )


def source_of(want: Wanted, model: ServedModel, prompt: Sequence[int]) -> str:
    """The grammar of what is wanted after `prompt`."""
    ids = model.vocabulary.control.ids
    rules = ["TEXT: /(.|\\n)*/", BREAK]
    if want.answer is not None:
        rules.append(f"body: {json_value(want.answer[1])}")
    if want.calls:
        rules.append("call: " + " | ".join(f"call{place}" for place in range(len(want.calls))))
    for place, (_, name, schema) in enumerate(want.calls):
        rules += call_rules(place, name, schema, ids)
    return "\n".join([f"start: {_thinking(model, prompt)}{_top(want)}", *rules, ""])


def _top(want: Wanted) -> str:
    if want.free:
        return "TEXT (call TEXT)*"
    if not want.calls:
        return "body"
    calls = "call" if want.one else "call (BREAK call)*"
    return f"(body | {calls})" if want.answer is not None else calls


def _thinking(model: ServedModel, prompt: Sequence[int]) -> str:
    """What may come before the answer: the rest of a thinking block that the prompt opened, or one of the model's own."""
    ids = model.vocabulary.control.ids
    if not ids.keys() >= {"<think>", "</think>"}:
        return ""
    begin, end = ids["<think>"], ids["</think>"]
    last = next((token for token in reversed(prompt[-32:]) if token in (begin, end)), None)
    if last == begin:
        return f"TEXT {token(end)} BREAK "
    thinks = model.template is not None and model.template.thinks
    return f"({token(begin)} TEXT {token(end)} BREAK)? " if last is None and thinks else ""


class GrammarMaker:
    """Writes grammars and tries them. `make` may run in any thread."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings: Final = settings

    def make(self, want: Wanted, model: ServedModel, prompt: Sequence[int]) -> str:
        """The source that goes with the request. Raises InvalidRequest, which names the field."""
        schemas = want.schemas()
        first, _ = schemas[0]
        size = sum(len(json.dumps(schema)) for _, schema in schemas)
        if size > self._settings.max_schema_bytes:
            raise InvalidRequest(
                f"the schemas of a request may have {self._settings.max_schema_bytes} bytes, not {size}",
                param=first,
            )
        with _refused_at(first):
            tokens = model.grammar_tokens.get()
        for param, schema in schemas:
            with _refused_at(param):
                compile_grammar(f"start: {json_value(schema)}", tokens)
        source = source_of(want, model, prompt)
        with _refused_at(first):
            compile_grammar(source, tokens)
        return source


@contextmanager
def _refused_at(param: str) -> Iterator[None]:
    """A refusal names the field that asked."""
    try:
        yield
    except GrammarRefused as error:
        raise GrammarRefused(f"{param}: {error.message}", param=param) from error
