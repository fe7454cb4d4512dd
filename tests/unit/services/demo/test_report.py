"""What the demo promises, judged."""

from __future__ import annotations

import pytest

from services.demo.report import ALIKE, Turn, essential, reuse_faults
from services.demo.script import run_tool
from shared.tracestore import StoredSpan


def turn(prompt: int, cached: int) -> Turn:
    return Turn(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=1,
        tokens_per_verify=1.0,
        trace_id="",
        text="",
        seconds_to_first_token=0.0,
        tool_calls=0,
    )


@pytest.mark.parametrize(("cached", "good"), [(256, True), (194, True), (193, False), (0, False)])
def test_all_but_63_tokens_of_the_stable_part_are_reused(cached: int, good: bool) -> None:
    """Request 1 has 260 tokens, 3 of them header: 257 are stable, and 194 is the least that the rule allows."""
    assert (reuse_faults([turn(260, 0), turn(300, cached)], header_tokens=3) == []) is good


def test_every_request_is_judged_against_the_one_before() -> None:
    faults = reuse_faults([turn(260, 0), turn(300, 256), turn(350, 0)], header_tokens=3)
    assert faults == ["request 3 reused 0 tokens; at least 234 could be"]


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("convert_units", '{"value": 5, "from": "km", "to": "miles"}', '{"result": 3.11, "unit": "miles"}'),
        ("convert_units", '{"value": "x", "from": "km", "to": "miles"}', '{"error": "bad argument"}'),
        ("convert_units", '{"value": 5}', '{"error": "bad argument"}'),
        ("convert_units", "{", '{"error": "bad argument"}'),
        ("convert_units", "[]", '{"error": "bad argument"}'),
        ("rm", "{}", '{"error": "not found"}'),
    ],
)
def test_the_tool_answers_whatever_the_model_wrote(name: str, arguments: str, answer: str) -> None:
    assert run_tool(name, arguments) == answer


def span(identifier: str, parent: str, name: str) -> StoredSpan:
    return StoredSpan(
        trace_id="t", span_id=identifier, parent_id=parent, service="s", name=name, start_ns=0, end_ns=1
    )


def test_the_essential_of_a_trace_is_shallow_and_without_long_runs() -> None:
    spans = [
        span("a", "remote", "http"),
        span("b", "a", "worker"),
        span("c", "b", "lease"),
        span("d", "c", "sql"),
    ]
    bursts = [span(f"x{number}", "b", "burst") for number in range(ALIKE + 5)]
    assert essential(spans + bursts) == spans[:3] + bursts[:ALIKE]
