"""What callers ask an answer to look like, as the grammar that is queued: each kind, what it allows, and that it is tried first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.gateway import app, faults
from services.gateway.config import GatewaySettings
from services.gateway.grammars import GrammarMaker, source_of, wanted
from services.gateway.model import ServedModel, load_model
from services.gateway.schemas.chat import ChatRequest
from services.gateway.service import read_vocabularies
from shared import grammar as shared_grammar
from shared import telemetry
from shared.config import POCKET, CommonSettings
from shared.errors import Unavailable
from shared.grammar import GrammarRefused, compile_grammar, read_tokens
from shared.protocol import codec
from tests.unit.services.gateway.line import Line

BASE: dict[str, Any] = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}]}
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
STRICT = {"type": "function", "function": {"name": "add", "parameters": NUMBER, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "look"}}
PROMPT = (1, 300, 2)
THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_model("pocket", POCKET)


@pytest.fixture(scope="module")
def tokens(model: ServedModel) -> LLTokenizer:
    return read_tokens(POCKET, model.vocabulary.size)


@pytest.fixture(scope="module")
def maker() -> GrammarMaker:
    return GrammarMaker(GatewaySettings())


def source(maker: GrammarMaker, model: ServedModel, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> str:
    body = BASE | fields
    want = wanted(faults.validate(ChatRequest, body), body.get("tools"))
    assert want is not None
    return maker.make(want, model, prompt)


def accepts(text: str, grammar: str, tokens: LLTokenizer) -> bool:
    """Whether the text, its control tokens as such, is a whole answer."""
    ids = tokens.tokenize_str(text, parse_special=True)
    matcher: LLMatcher = compile_grammar(grammar, tokens)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def call(name: str, arguments: str) -> str:
    return f'{CALL}\n{{"name": "{name}", "arguments": {arguments}}}\n{END_CALL}'


ANY = {"response_format": {"type": "json_object"}}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}}
BOTH = {"tools": [STRICT, LOOSE]}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (ANY, ['{"a": [1, null]}', "{}", '{\n  "a": 1\n}'], ["[]", "1", "Sure: {}", '{"a": }', '{"a": 1}x']),
        (SCHEMA, ['{"x": 3}', '{"x":3,"y":[]}'], ["{}", '{"x": "3"}']),
        (BOTH | {"tool_choice": "required"}, [call("add", '{"x": 1}'), call("look", "{}"),
            call("look", '{"any": 1}') + "\n" + call("add", '{"x": 1}')],
            ["", "text", call("add", "{}"), call("nobody", "{}"), "text" + call("look", "{}")]),
        (BOTH | {"tool_choice": {"type": "function", "function": {"name": "look"}}}, [call("look", "{}")],
            [call("add", '{"x": 1}'), call("look", "{}") + call("look", "{}")]),
        (BOTH, ["", "Hello.", call("add", '{"x": 1}'), "I add.\n" + call("add", '{"x": 1}') + call("look", "{}")],
            [call("add", '{"x": "1"}'), call("nobody", "{}"), CALL]),
        (BOTH | ANY, ["{}", call("look", "{}")], ["text", "{}" + call("look", "{}")]),
    ],
    ids=["json_object", "json_schema", "required", "named", "strict under auto", "json or calls"],
)  # fmt: skip
def test_the_grammar_of_each_field(
    maker: GrammarMaker,
    model: ServedModel,
    tokens: LLTokenizer,
    fields: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    grammar = source(maker, model, **fields)
    assert [text for text in good if not accepts(text, grammar, tokens)] == []
    assert [text for text in bad if accepts(text, grammar, tokens)] == []


@pytest.mark.parametrize("fields", [{}, {"tools": [LOOSE]}, {"response_format": {"type": "text"}},
    {"tools": [STRICT], "tool_choice": "none"}])  # fmt: skip
def test_who_asks_for_nothing_gets_no_grammar(fields: dict[str, Any]) -> None:
    body = BASE | fields
    assert wanted(faults.validate(ChatRequest, body), body.get("tools")) is None


def test_control_tokens_are_no_part_of_a_string(
    maker: GrammarMaker, model: ServedModel, tokens: LLTokenizer
) -> None:
    """Else a client's parser would end the JSON in the midst of it."""
    grammar = source(maker, model, **ANY)
    assert not accepts(f'{{"a": "{CALL}"}}', grammar, tokens)


def test_a_thinking_block_that_the_prompt_opened_comes_before_the_answer(
    maker: GrammarMaker, model: ServedModel, tokens: LLTokenizer
) -> None:
    think, end = (model.vocabulary.control.ids[text] for text in (THINK, END_THINK))
    opened = source(maker, model, (1, think), **ANY)
    assert accepts(f"Well, let me see.{END_THINK}\n\n{{}}", opened, tokens)
    assert not accepts("{}", opened, tokens)
    assert accepts("{}", source(maker, model, (1, think, end), **ANY), tokens)


def test_a_template_that_knows_of_thinking_lets_the_model_think_or_not(
    model: ServedModel, tokens: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = BASE | ANY
    want = wanted(faults.validate(ChatRequest, body), None)
    assert want is not None
    assert model.template is not None
    assert not accepts(f"{THINK}Hm{END_THINK}{{}}", source_of(want, model, PROMPT), tokens)
    monkeypatch.setattr(model.template, "thinks", True)
    grammar = source_of(want, model, PROMPT)
    assert accepts(f"{THINK}Hm{END_THINK}\n{{}}", grammar, tokens)
    assert accepts("{}", grammar, tokens)


async def test_a_gateway_reads_its_vocabularies_before_it_connects(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading holds the interpreter: it must not come in the midst of streams."""
    read: list[Path] = []

    async def refuse(*_: object, **__: object) -> None:
        assert read == [POCKET]
        raise Unavailable("far enough")

    def count(folder: Path, size: int) -> LLTokenizer:
        read.append(folder)
        return read_tokens(folder, size)

    monkeypatch.setattr(shared_grammar, "read_tokens", count)
    monkeypatch.setattr(app, "connect", refuse)
    with pytest.raises(Unavailable, match="far enough"):
        await app.run(GatewaySettings(), CommonSettings(), telemetry.build("gateway", None))
    assert read == [POCKET]


def test_a_vocabulary_that_cannot_be_constrained_is_told_and_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(folder: Path, size: int) -> LLTokenizer:
        raise GrammarRefused("the model's tokenizer cannot be constrained: no such kind")

    monkeypatch.setattr(shared_grammar, "read_tokens", refuse)
    fresh = load_model("pocket", POCKET)
    read_vocabularies({"pocket": fresh})
    assert "no answer of pocket can follow a grammar" in caplog.text
    with pytest.raises(GrammarRefused, match="no such kind") as refused:
        source(GrammarMaker(GatewaySettings()), fresh, **ANY)
    assert refused.value.param == "response_format"


async def test_the_grammar_goes_with_the_request_and_its_absence_costs_no_byte(line: Line) -> None:
    for fields in ({}, ANY):
        answer = await line.chat(**fields)
        assert answer.status_code == 200, answer.text
    plain, constrained = [work.request for work in line.worker.works]
    assert b"grammar" not in codec.encode(plain)
    assert "start: body" in str(constrained.grammar)
    assert codec.decode(codec.encode(constrained)) == constrained
