"""Masks of a grammar: what they allow, how they follow a history that grows and shrinks, and how a token is picked under them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.grammar import GrammarState
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.sampling import TokenPicker
from shared.errors import EngineFault
from shared.grammar import GrammarRefused
from tests.engine_kit import GREEDY
from tests.grammar_kit import END, VOCAB, grammar, of_schema, text_of, tokens

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": [True, "ab", None]}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def state(schema: dict[str, object] = SCHEMA) -> GrammarState:
    return of_schema(schema).begin(VOCAB, {END})


def spelt(mask: np.ndarray) -> set[str]:
    return {text_of([token]) for token in np.flatnonzero(mask) if token != END}


def test_the_mask_is_of_what_may_come_and_the_end_comes_when_the_value_is_complete() -> None:
    walk = state({"enum": [12, True]})
    assert spelt(walk.allowed()) == {"1", "12", "t", "tr", "true"}
    assert not walk.allowed()[END]
    for token in tokens().tokenize_str("true"):
        walk.record(token)
    assert np.flatnonzero(walk.allowed()).tolist() == [END]


def test_ids_that_no_token_has_are_never_allowed() -> None:
    assert not state({}).allowed()[300:].any()


def test_a_caller_s_stop_id_that_is_text_obeys_the_grammar_and_may_end_a_complete_value() -> None:
    brace = tokens().tokenize_str("}")[0]
    walk = of_schema({"type": "boolean"}).begin(VOCAB, {END, brace})
    assert not walk.allowed()[brace]
    for token in tokens().tokenize_str("true"):
        walk.record(token)
    assert np.flatnonzero(walk.allowed()).tolist() == sorted([END, brace])


def test_after_an_end_that_a_drafter_tried_only_an_end_may_come_and_forgetting_it_leaves_no_trace() -> None:
    walk = state()
    before = walk.allowed()
    walk.record(END)
    assert np.flatnonzero(walk.allowed()).tolist() == [END]
    walk.forget()
    assert (walk.allowed() == before).all()


def test_a_history_that_breaks_the_grammar_is_a_fault_of_its_stream() -> None:
    walk = state()
    walk.record(tokens().tokenize_str("x")[0])
    with pytest.raises(EngineFault) as caught:
        walk.allowed()
    assert caught.value.code == "grammar_fault"


@given(moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10_000)), max_size=24))
@settings(max_examples=60, deadline=None)
def test_trying_and_forgetting_gives_the_masks_of_a_fresh_walk(moves: list[tuple[int, int]]) -> None:
    walk, history = state(), []
    for back, choice in moves:
        for _ in range(min(back, len(history))):
            walk.forget()
            history.pop()
        options = np.flatnonzero(walk.allowed())
        token = int(options[choice % len(options)])
        if token == END:
            continue
        walk.record(token)
        history.append(token)
    fresh = state()
    for token in history:
        fresh.record(token)
    assert (walk.allowed() == fresh.allowed()).all()


def picker(params: SamplingParams, schema: dict[str, object]) -> TokenPicker:
    return TokenPicker(params, vocab=VOCAB, prompt=[5, 6], stop_ids={END}, grammar=of_schema(schema))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, temperature=1.3, top_p=0.9)])
def test_whatever_the_logits_say_the_text_is_a_value_of_the_schema(params: SamplingParams) -> None:
    # The end is likely, so that what need not come does not, for ever.
    draw, pick, said = np.random.default_rng(1), picker(params, SCHEMA), []
    for position in range(2, 400):
        row = draw.normal(size=VOCAB).astype(np.float32)
        row[[END, *tokens().tokenize_str("}"), *tokens().tokenize_str("]")]] += 2
        token = pick.pick(row, position)
        if token == END:
            break
        pick.record(token)
        said.append(token)
    value = json.loads(text_of(said))
    assert set(value) == {"a", "b"}
    assert isinstance(value["a"], int)


def test_min_tokens_gives_way_where_the_grammar_has_nothing_but_the_end() -> None:
    pick = picker(replace(GREEDY, min_tokens=50), {"const": True})
    row = np.zeros(VOCAB, dtype=np.float32)
    said: list[int] = []
    while (token := pick.pick(row, 2 + len(said))) != END:
        pick.record(token)
        said.append(token)
    assert text_of(said) == "true"


def test_a_bias_that_would_have_another_token_does_not_break_the_grammar() -> None:
    pick = picker(replace(GREEDY, logit_bias=((77, 100.0),)), {"const": 12})
    assert text_of([pick.pick(np.zeros(VOCAB, dtype=np.float32), 2)]) in ("1", "12")


def test_a_stream_with_a_grammar_is_picked_on_the_host() -> None:
    assert not picker(GREEDY, SCHEMA).pickable
    assert picker(GREEDY, SCHEMA).ask(7) is None


@pytest.mark.parametrize(
    "source",
    ["start: nobody", 'start: %json {"not": {}}', 'start: %json {"$ref": "http://127.0.0.1/x"}', "start: ("],
)
def test_a_grammar_that_cannot_be_compiled_says_why_in_a_line(source: str) -> None:
    with pytest.raises(GrammarRefused) as caught:
        grammar(source)
    assert caught.value.message
    assert "\n" not in caught.value.message
