"""What counts as a difference, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from services.gpu_worker.engine.events import Finished, FinishReason, SpecTelemetry, TokenLogprob
from services.prove.axes import AXES, Cell
from services.prove.compare import Difference, Exam, judge
from services.prove.driver import CacheBytes, Record, same_bits

CELL = Cell(**{axis: next(iter(values)) for axis, values in AXES.items()})
PROMPT = 70


def ended(reason: FinishReason = FinishReason.LENGTH, tokens: int = 4) -> Finished:
    return Finished(
        request_id="r",
        choice=0,
        reason=reason,
        error_code=None,
        detail=None,
        prompt_tokens=PROMPT,
        cached_tokens=0,
        completion_tokens=tokens,
        stop_id=None,
        telemetry=SpecTelemetry(),
        end_ns=0,
    )


def record() -> Record:
    draw = torch.Generator().manual_seed(1)
    return Record(
        tokens=[1, 2, 3, 4],
        logprobs=[TokenLogprob(token=token, logprob=-0.5) for token in (1, 2, 3, 4)],
        finished=ended(),
        cache=CacheBytes(
            committed=tuple(range(73)),
            rows=torch.randn(2, 1, 2, 73, 4, generator=draw),
            draft=torch.randn(2, 2, PROMPT, 4, generator=draw),
            state=torch.randn(3, 2, 4, 4, generator=draw),
            window=torch.randn(3, 3, 8, generator=draw),
            parts={"ring": torch.ones(4)},
        ),
    )


def exam(**changes: object) -> Exam:
    plain = Exam(
        cell=CELL,
        request_id="cell-1",
        prompt_tokens=PROMPT,
        known=0,
        logprobs=True,
        cached_tokens=0,
        gap=lambda index, expected, got: index + 0.25,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def told(got: Record, **changes: object) -> list[Difference]:
    return judge(exam(**changes), record(), got).differences


def test_equal_records_are_counted_and_not_told() -> None:
    verdict = judge(exam(), record(), record())
    assert not verdict.differences
    assert verdict.compared == {
        "tokens": 4,
        "logprobs": 4,
        "ending": 1,
        "cached tokens": 1,
        "committed tokens": 1,
        "kv rows": 73,
        "draft plane": 70,
        "recurrent state": 3,
        "conv window": 3,
        "ring": 1,
    }


def test_a_difference_names_request_cell_position_ids_and_gap() -> None:
    got = record()
    got.tokens = [1, 2, 9, 4]
    (difference,) = told(got)
    assert (difference.kind, difference.position) == ("tokens", PROMPT + 2)
    assert (difference.expected, difference.got, difference.logit_gap) == ("3", "9", 2.25)
    for part in ("cell-1", "position 72", "expected 3, got 9", "gap 2.25", str(CELL)):
        assert part in str(difference)


def test_a_short_stream_has_no_gap() -> None:
    got = record()
    got.tokens = [1, 2]
    (difference,) = told(got)
    assert (difference.expected, difference.got, difference.logit_gap) == ("3", "nothing", None)


def test_positions_count_from_the_journalled_tokens() -> None:
    got = record()
    got.tokens, got.logprobs = [3, 9], record().logprobs[2:]  # type: ignore[index]
    (difference,) = told(got, known=2)
    assert difference.position == PROMPT + 3
    assert difference.logit_gap == 3.25


def _one_bit(got: Record) -> None:
    assert got.cache is not None
    got.cache.rows.view(torch.int32)[0, 0, 1, 40, 2] ^= 1


def _one_draft_bit(got: Record) -> None:
    assert got.cache is not None
    assert got.cache.draft is not None
    got.cache.draft.view(torch.int32)[1, 1, 64, 0] ^= 1


def _one_state_bit(got: Record) -> None:
    assert got.cache is not None
    got.cache.state.view(torch.int32)[2, 0, 0, 0] ^= 1


def _one_window_bit(got: Record) -> None:
    assert got.cache is not None
    got.cache.window.view(torch.int32)[0, 0, 0] ^= 1


def _other_row(got: Record) -> None:
    assert got.cache is not None
    got.cache = replace(got.cache, committed=(*range(72), 9))


def _one_part_bit(got: Record) -> None:
    assert got.cache is not None
    part = got.cache.parts["ring"].clone()
    part.view(torch.int32)[1] ^= 1
    got.cache = replace(got.cache, parts={"ring": part})


def _a_part_less(got: Record) -> None:
    assert got.cache is not None
    got.cache = replace(got.cache, parts={})


def _one_row_less(got: Record) -> None:
    assert got.cache is not None
    got.cache = replace(got.cache, rows=got.cache.rows[:, :, :, :-1])


def _other_logprob(got: Record) -> None:
    assert got.logprobs is not None
    got.logprobs[3] = TokenLogprob(token=4, logprob=-0.5000000000000001)


def _other_end(got: Record) -> None:
    got.finished = ended(FinishReason.STOP)


def _other_hit(got: Record) -> None:
    got.cached_tokens = 64


def _no_cache(got: Record) -> None:
    got.cache = None


@pytest.mark.parametrize(
    ("spoil", "kind", "position"),
    [
        (_one_bit, "kv rows", 40),
        (_one_draft_bit, "draft plane", 64),
        (_one_state_bit, "recurrent state", None),
        (_one_window_bit, "conv window", None),
        (_other_row, "committed tokens", None),
        (_one_part_bit, "ring", None),
        (_a_part_less, "ring", None),
        (_one_row_less, "kv rows", None),
        (_other_logprob, "logprobs", PROMPT + 3),
        (_other_end, "ending", None),
        (_other_hit, "cached tokens", None),
        (_no_cache, "cache", None),
    ],
)
def test_one_bit_is_a_difference(spoil: Callable[[Record], None], kind: str, position: int | None) -> None:
    got = record()
    spoil(got)
    (difference,) = told(got)
    assert (difference.kind, difference.position) == (kind, position)


def test_logprobs_that_nobody_asked_for_are_a_difference() -> None:
    (difference,) = told(record(), logprobs=False)
    assert difference.kind == "logprobs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_bits_of_either_type_are_compared_at_any_width(dtype: torch.dtype, width: int) -> None:
    """Equal values of other bits are a difference: -0 is not 0. What is empty is equal to its like."""
    one = torch.ones(5, width, dtype=dtype)
    one[4, 0] = 0.0
    other = one.clone()
    assert same_bits(one, other)
    other[4, 0] = -0.0
    assert torch.equal(one, other)
    assert not same_bits(one, other)
    assert same_bits(one[:0], other[:0])
    assert not same_bits(one, other[:4])
