"""What is refused before anything is taken, and with which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.gpu_worker.engine.intake import check_request
from services.gpu_worker.engine.requests import SamplingParams
from shared.errors import ContextLengthExceeded, InvalidRequest
from tests.engine_kit import prompt, request


def test_a_good_request_passes() -> None:
    check_request(request(prompt(100)), vocab=512, window=112)


def test_fr_16_too_long_names_the_largest_servable_length() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        check_request(request(prompt(100), max_tokens=13), vocab=512, window=112)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.window) == (100, 13, 112)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tokens": ()}, "tokens"),
        ({"tokens": (512,) * 100}, "tokens"),
        ({"tokens": (-1,) * 100}, "tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"chain": ()}, "chain"),
        ({"root": b"short"}, "chain"),
        ({"emitted": (1,) * 13}, "emitted"),
        ({"emitted": (999,)}, "emitted"),
        ({"stop_ids": frozenset({999})}, "stop_ids"),
        ({"speculation_k": -1}, "speculation_k"),
        ({"sampling": SamplingParams(seed=-1)}, "seed"),
        ({"sampling": SamplingParams(seed=2**64)}, "seed"),
        ({"sampling": SamplingParams(seed=0, temperature=-0.1)}, "temperature"),
        ({"sampling": SamplingParams(seed=0, temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(seed=0, top_p=1.5)}, "top_p"),
        ({"sampling": SamplingParams(seed=0, min_p=-1)}, "min_p"),
        ({"sampling": SamplingParams(seed=0, repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": SamplingParams(seed=0, allowed_ids=frozenset())}, "allowed_ids"),
        ({"sampling": SamplingParams(seed=0, logit_bias=((999, 1.0),))}, "logit_bias"),
        ({"sampling": SamplingParams(seed=0, banned_ids=frozenset({999}))}, "banned_ids"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(replace(request(prompt(100)), **change), vocab=512, window=4096)
    assert caught.value.param == param
