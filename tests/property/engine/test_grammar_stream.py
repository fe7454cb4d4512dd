"""One stream under a grammar (C1): drafted by anybody at any width, in any company, set aside, demoted or resumed from a
journal in mid-value, the tokens and log probabilities are those of the request alone, cold and plain; and they spell a value
of the schema, or the beginning of one where the budget ended it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from tests.engine_kit import Driver, Outcome, build, prompt, request, run_one
from tests.grammar_kit import END, of_schema, text_of
from tests.property.engine.test_one_stream import Trouble

SCHEMAS = [
    {"enum": ["ab", True, 12, None]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 6, "pattern": "^[ab]*$"},
            "b": {"enum": [True, 12]},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
]
PARAMS = [
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=1.0, min_tokens=3),
    SamplingParams(seed=3, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2),
]
PROMPTS = [prompt(140, 1), prompt(30, 4)]


def item(which: int, schema: int | None, rule: int, budget: int) -> GenerateRequest:
    return request(
        PROMPTS[which],
        max_tokens=budget,
        sampling=PARAMS[rule],
        stop_ids=frozenset({END}),
        top_logprobs=2,
        grammar=None if schema is None else of_schema(SCHEMAS[schema]),
    )


@cache
def truth(which: int, schema: int | None, rule: int, budget: int) -> Outcome:
    return run_one(build(), replace(item(which, schema, rule, budget), use_cache=False))


Asked = tuple[int, int | None, int, int, int, str, int]


@st.composite
def asked(draw: st.DrawFn) -> list[Asked]:
    """(prompt, schema, rule, budget, drafts, drafter, journalled tokens)."""
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, len(PROMPTS) - 1),
                st.sampled_from([None, *range(len(SCHEMAS))]),
                st.integers(0, len(PARAMS) - 1),
                st.sampled_from([3, 40]),
                st.integers(0, 7),
                st.sampled_from(["mtp", "ngram", "auto"]),
                st.integers(0, 12),
            ),
            min_size=1,
            max_size=4,
        )
    )


@given(
    plan=asked(),
    rounds=st.sampled_from([1, 7]),
    blocks=st.sampled_from([9, 64]),
    short=st.sets(st.integers(0, 30), max_size=2),
    demote_at=st.sampled_from([2, 99]),
    checkpoints=st.sampled_from([0, 1]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_fr_40_a_grammar_leaves_one_stream_whoever_drafts_it(
    plan: list[Asked], rounds: int, blocks: int, short: set[int], demote_at: int, checkpoints: int
) -> None:
    limits = EngineLimits(burst_rounds=rounds, decode_ckpt_blocks=checkpoints)
    driver = Driver(build(limits=limits, num_blocks=blocks, faults=Trouble(short, demote_at)))
    expected: dict[tuple[str, int], tuple[Outcome, int, int | None]] = {}
    for number, (which, schema, rule, budget, drafts, drafter, known) in enumerate(plan):
        alone = truth(which, schema, rule, budget)
        chosen = replace(
            item(which, schema, rule, budget),
            request_id=f"{number}",
            drafter=drafter,
            speculation_k=drafts,
            emitted=tuple(alone.tokens[:known]),
        )
        driver.submit(chosen)
        expected[chosen.key] = (alone, len(chosen.emitted), schema)
    outcomes = driver.run()
    for key, (alone, known, schema) in expected.items():
        got = outcomes[key]
        assert got.tokens == alone.tokens[known:]
        assert got.logprobs == alone.logprobs[known:]
        assert (got.end.reason, got.end.stop_id) == (alone.end.reason, alone.end.stop_id)
        if schema is not None and alone.end.reason is FinishReason.STOP:
            json.loads(text_of(alone.tokens))
        assert alone.end.reason in (FinishReason.STOP, FinishReason.LENGTH)
    driver.engine.check()
