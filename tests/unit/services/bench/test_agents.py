"""A trace is the same every time, grows turn by turn, drops old thinking, and branches."""

from __future__ import annotations

from services.bench.agents import BRANCH_AT, Ask, trace
from services.bench.prefixes import common_prefix, reusable, stable_floor


def small() -> list[Ask]:
    return trace(tenants=2, turns=BRANCH_AT + 1, branches=2)


def test_a_trace_is_reproducible_and_its_tenants_ask_the_same() -> None:
    asks = small()
    assert asks == small()
    by_tenant = [[ask.tokens for ask in asks if ask.tenant == tenant] for tenant in range(2)]
    assert by_tenant[0] == by_tenant[1]
    assert [ask.tenant for ask in asks[:4]] == [0, 1, 0, 1]


def test_the_stable_boundary_is_where_the_next_prompt_still_agrees() -> None:
    asks = {ask.name: ask for ask in small()}
    for turn in range(BRANCH_AT):
        call, answer = asks[f"trunk/{turn}/call"], asks[f"trunk/{turn}/answer"]
        assert len(call.tokens) > call.stable
        assert common_prefix(call.tokens, answer.tokens) >= call.stable


def test_a_new_turn_drops_the_thinking_of_the_turn_before() -> None:
    """What the answer's prompt held from the thinking on is rendered differently in the next turn."""
    asks = {ask.name: ask for ask in small()}
    call, answer, following = (asks[f"trunk/{name}"] for name in ("1/call", "1/answer", "2/call"))
    shared = common_prefix(answer.tokens, following.tokens)
    assert call.stable <= shared < answer.stable


def test_reusable_is_the_longest_common_prefix_within_the_tenant() -> None:
    asks = [
        Ask(tenant=0, name="a", tokens=(1, 2, 3), stable=2),
        Ask(tenant=1, name="b", tokens=(1, 2, 3), stable=2),
        Ask(tenant=0, name="c", tokens=(1, 2, 3), stable=3),
        Ask(tenant=0, name="d", tokens=(1, 2, 3, 4, 5), stable=4),
        Ask(tenant=0, name="e", tokens=(1, 9), stable=1),
    ]
    assert reusable(asks) == [0, 0, 2, 3, 1]
    assert stable_floor(asks) == [0, 0, 2, 3, 0]
