"""Operations in which a row knows no other: products, norms, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kernels import activation, matmul, norm_rope
from kernels.gate.ledger import Check, Ledger, poisoned_but
from kernels.gate.sizes import Place

EPS = 1e-6
_SLICE = 32_768
"""Outputs of a float64 product that are held at once."""


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Products of every shape and regime, then what stands between them."""
    recipes: tuple[matmul.Recipe, ...] = ("card", "card-fp8") if place.sizes.float8 else ("card",)
    for recipe, prefill in product(recipes, (False, True)):
        kind = f"matmul{' float8' if recipe != 'card' else ''}{' prefill' if prefill else ''}"
        for name, n, k in place.sizes.weights:
            if not (prefill and n == place.sizes.vocab):  # a head is only ever asked for a few rows
                yield f"{kind} {name}", partial(_product, place, n, k, recipe=recipe, prefill=prefill)
        yield f"{kind} swiglu", partial(_swiglu, place, recipe=recipe, prefill=prefill)
    yield "rms_norm", partial(_rms_norm, place)
    yield "add_rms_norm", partial(_add_rms_norm, place)
    yield "gated_norm", partial(_gated_norm, place)
    yield "swiglu", partial(_activation, place, gate=False)
    yield "sigmoid_gate", partial(_activation, place, gate=True)


def rows_alone(
    ledger: Ledger, operation: Callable[..., Tensor], inputs: Sequence[Tensor], counts: Sequence[int]
) -> Tensor:
    """Compare `count` rows from some row on with the same rows of the whole; then a few among broken ones."""
    rows = inputs[0].shape[0]
    whole = operation(*inputs).clone()
    for count in counts:
        for first in {0, count * 37 % (rows - count + 1)}:
            part = operation(*(each[first : first + count].clone() for each in inputs))
            ledger.equal(part, whole[first : first + count], f"{count} rows from row {first}")
    first, count = rows // 3, max(1, rows // 5)
    among = operation(*(poisoned_but(each, first, count) for each in inputs))
    ledger.equal(among[first : first + count], whole[first : first + count], "rows among NaN")
    return whole


def _counts(place: Place, *, prefill: bool) -> tuple[int, ...]:
    return place.sizes.prefill_counts if prefill else place.sizes.product_counts


def _rows(place: Place, *, prefill: bool) -> int:
    return max(_counts(place, prefill=prefill)) + 64


def _product(place: Place, n: int, k: int, ledger: Ledger, *, recipe: matmul.Recipe, prefill: bool) -> None:
    weight = place.normal(n, k, seed=n + k, scale=k**-0.5)
    x = place.normal(_rows(place, prefill=prefill), k, seed=n)
    wide = n == place.sizes.vocab
    packed = matmul.pack(weight, recipe)
    run = partial(matmul.linear, packed=packed, prefill=prefill, out_dtype=torch.float32 if wide else None)
    whole = rows_alone(ledger, run, [x], _counts(place, prefill=prefill))
    if not (prefill or wide):
        _parts(place, ledger, x, packed, whole)
    exact = _exact_product(x[:64], _exact_weight(weight, recipe))
    ledger.close(whole[:64], exact, place.limit(single=1e-5) if not wide else 1e-5)


def _parts(place: Place, ledger: Ledger, x: Tensor, packed: matmul.Packed, whole: Tensor) -> None:
    """Parts of a product, added here or by the norm that takes them, against the product itself."""
    scale = 1 + place.normal(whole.shape[1], seed=9, scale=0.1, dtype=torch.float32)
    for count in _counts(place, prefill=False):
        parts, product_ = matmul.linear_parts(x[:count], packed), whole[:count]
        ledger.equal(norm_rope.added(parts, x.dtype), product_, f"parts of {count} rows")
        ours, theirs = product_.clone(), product_.clone()
        normed = norm_rope.add_rms_norm(theirs, product_, scale, EPS)
        ledger.equal(
            norm_rope.add_rms_norm(ours, parts, scale, EPS), normed, f"norm of parts of {count} rows"
        )
        ledger.equal(ours, theirs, f"sum with parts of {count} rows")


def _swiglu(place: Place, ledger: Ledger, *, recipe: matmul.Recipe, prefill: bool) -> None:
    n, k = 2 * place.sizes.ffn, place.sizes.hidden
    weight = place.normal(n, k, seed=n + k, scale=k**-0.5)
    x = place.normal(_rows(place, prefill=prefill), k, seed=n)
    packed = matmul.pack(weight, recipe, pairs=True)
    run = partial(matmul.linear_swiglu, packed=packed, prefill=prefill)
    whole = rows_alone(ledger, run, [x], _counts(place, prefill=prefill))
    gate, up = _exact_product(x[:64], _exact_weight(weight, recipe)).chunk(2, dim=1)
    ledger.close(whole[:64], torch.nn.functional.silu(gate) * up, place.limit())


def _exact_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x.double() @ part.T for part in weight.split(_SLICE)], dim=1)


def _exact_weight(weight: Tensor, recipe: matmul.Recipe) -> Tensor:
    """The weight in float64, a float8 one as its definition rounds it."""
    if recipe == "card":
        return weight.double()
    largest = weight.abs().amax(dim=1).float()
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)[:, None]
    return (weight.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


def _rms_norm(place: Place, ledger: Ledger) -> None:
    x = place.normal(_rows(place, prefill=True), place.sizes.hidden, seed=1)
    scale = 1 + place.normal(place.sizes.hidden, seed=2, scale=0.1, dtype=torch.float32)
    whole = rows_alone(ledger, lambda rows: norm_rope.rms_norm(rows, scale, EPS), [x], _both_counts(place))
    ledger.close(whole, _norm(x.double()) * scale, place.limit(single=1e-6))


def _add_rms_norm(place: Place, ledger: Ledger) -> None:
    x = place.normal(_rows(place, prefill=True), place.sizes.hidden, seed=3)
    delta = place.normal(*x.shape, seed=4)
    scale = 1 + place.normal(place.sizes.hidden, seed=5, scale=0.1, dtype=torch.float32)

    def run(rows: Tensor, added: Tensor) -> Tensor:
        residual = rows.clone()
        normed = norm_rope.add_rms_norm(residual, added, scale, EPS)
        return torch.cat([residual, normed], dim=1)

    whole = rows_alone(ledger, run, [x, delta], _both_counts(place))
    total = x.double() + delta.double()
    rounded = total.to(place.dtype).double()
    ledger.close(whole, torch.cat([total, _norm(rounded) * scale], dim=1), place.limit(single=1e-6))


def _gated_norm(place: Place, ledger: Ledger) -> None:
    shape = place.sizes.delta
    rows = _rows(place, prefill=True)
    x = place.normal(rows, shape.value_heads, shape.value_dim, seed=6, dtype=torch.float32)
    gate = place.normal(rows, shape.value_heads, shape.value_dim, seed=7)
    weight = 1 + place.normal(shape.value_dim, seed=8, scale=0.1, dtype=torch.float32)

    def run(values: Tensor, by: Tensor) -> Tensor:
        return norm_rope.gated_norm(values, by, weight, EPS)

    whole = rows_alone(ledger, run, [x, gate], _both_counts(place))
    silu = torch.nn.functional.silu(gate.double())
    ledger.close(whole, _norm(x.double()) * weight * silu, place.limit(single=2e-6))


def _activation(place: Place, ledger: Ledger, *, gate: bool) -> None:
    width, rows = place.sizes.ffn, _rows(place, prefill=True)
    both = place.normal(rows, 2 * width, seed=9)
    first, second = both.double().chunk(2, dim=1)
    if gate:
        whole = rows_alone(
            ledger, lambda x: activation.sigmoid_gate(x[:, :width], x[:, width:]), [both], _both_counts(place)
        )
        ledger.close(whole, first * second.sigmoid(), place.limit(single=2e-6))
    else:
        whole = rows_alone(ledger, activation.swiglu, [both], _both_counts(place))
        ledger.close(whole, torch.nn.functional.silu(first) * second, place.limit(single=2e-6))


def _both_counts(place: Place) -> tuple[int, ...]:
    return place.sizes.counts + place.sizes.prefill_counts


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS)
