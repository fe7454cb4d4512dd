"""Philox against its published known answers; the noise against its definition and its distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernels.sampling import gumbel, philox4x32

KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _words(values: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint32) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: str) -> None:
    words = philox4x32(_words(counter), key)
    assert [f"{word:08x}" for word in words[0]] == answer.split()


def test_philox_counters_do_not_depend_on_their_company() -> None:
    many = philox4x32((np.arange(100, dtype=np.uint32), *_words((7, 0, 0))), (1, 2))
    one = philox4x32(_words((63, 7, 0, 0)), (1, 2))
    assert np.array_equal(many[63], one[0])


def test_gumbel_layout_is_word_of_id_and_three() -> None:
    noise = gumbel(0x1234_5678_9ABC_DEF0, 17, 50, stream=3, choice=2)
    words = philox4x32(_words((33 >> 2, 17, 3, 2)), (0x9ABCDEF0, 0x12345678))
    uniform = (float(words[0, 33 & 3]) + 0.5) * 2.0**-32
    assert noise.dtype == np.float32
    assert noise.shape == (50,)
    assert noise[33] == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-5)


def test_gumbel_of_an_id_does_not_depend_on_the_vocabulary_size() -> None:
    assert np.array_equal(gumbel(5, 9, 1000)[:333], gumbel(5, 9, 333))


@pytest.mark.parametrize("change", [{"seed": 6}, {"position": 10}, {"stream": 1}, {"choice": 1}])
def test_gumbel_differs_in_every_key(change: dict[str, int]) -> None:
    key = {"seed": 5, "position": 9, "stream": 0, "choice": 0}
    base = gumbel(key["seed"], key["position"], 64, stream=key["stream"], choice=key["choice"])
    key |= change
    other = gumbel(key["seed"], key["position"], 64, stream=key["stream"], choice=key["choice"])
    assert not np.array_equal(base, other)


def test_gumbel_is_finite_and_has_the_mean_and_variance_of_its_law() -> None:
    noise = np.concatenate([gumbel(3, position, 4096) for position in range(64)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
