"""Products that rows share by group: experts and adapters. Their rows are sorted, so company decides where a row lies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels import experts, lora
from kernels.gate.ledger import Check, Ledger
from kernels.gate.rowwise import rows_alone
from kernels.gate.sizes import Place

ADAPTERS: Final = 5


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Both, in both phases."""
    for prefill in (False, True):
        phase = " prefill" if prefill else ""
        yield f"experts{phase}", partial(_experts, place, prefill=prefill)
        yield f"lora{phase}", partial(_lora, place, prefill=prefill)


def _counts(place: Place, *, prefill: bool) -> tuple[int, ...]:
    return place.sizes.prefill_counts if prefill else place.sizes.counts


def _experts(place: Place, ledger: Ledger, *, prefill: bool) -> None:
    sizes, counts = place.sizes, _counts(place, prefill=prefill)
    hidden, width, rows = sizes.expert_hidden, sizes.expert_ffn, max(counts) + 64
    gate_up = place.normal(sizes.experts, 2 * width, hidden, seed=1, scale=hidden**-0.5)
    down = place.normal(sizes.experts, hidden, width, seed=2, scale=width**-0.5)
    packed = experts.pack(gate_up, down, "card")
    x, shared = place.normal(rows, hidden, seed=3), place.normal(rows, hidden, seed=4)
    logits = place.normal(rows, sizes.experts, seed=5, scale=2.0, dtype=torch.float32)
    gate = place.normal(rows, 1, seed=6)

    def run(taken: Tensor, scores: Tensor, more: Tensor, by: Tensor) -> Tensor:
        routes = experts.route(scores, sizes.top_k)
        return experts.experts(taken, routes, packed, prefill=prefill, shared=more, shared_gate=by)

    whole = rows_alone(ledger, run, [x, logits, shared, gate], counts)
    exact = gate[:4].double().sigmoid() * shared[:4].double()
    for row in range(4):
        weights, ids = logits[row].double().softmax(0).topk(sizes.top_k)
        for weight, expert in zip(weights / weights.sum(), ids.tolist(), strict=True):
            first, second = (gate_up[expert].double() @ x[row].double()).chunk(2)
            inner = torch.nn.functional.silu(first) * second
            exact[row] += weight * (down[expert].double() @ inner)
    ledger.close(whole[:4], exact, place.limit(single=2e-6))


def _lora(place: Place, ledger: Ledger, *, prefill: bool) -> None:
    sizes, counts = place.sizes, _counts(place, prefill=prefill)
    _, n, k = sizes.weights[0]
    rows = max(counts) + 64
    adapters = lora.slots(ADAPTERS, sizes.rank, n, k, "card", place.normal(1, seed=1))
    for slot in range(ADAPTERS):
        lora.load(
            adapters, slot, place.normal(sizes.rank, k, seed=2 + slot, scale=k**-0.5),
            place.normal(n, sizes.rank, seed=12 + slot), 0.25 + slot,
        )  # fmt: skip
    base, x = place.normal(rows, n, seed=30), place.normal(rows, k, seed=31)
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(-1, ADAPTERS, (rows,), generator=generator).to(place.device, torch.int32)

    def run(under: Tensor, taken: Tensor, slots: Tensor) -> Tensor:
        return lora.add(under.clone(), taken, adapters, lora.rows_of(slots, ADAPTERS, prefill=prefill))

    whole = rows_alone(ledger, run, [base, x, index], counts)
    without = index == lora.NONE
    ledger.equal(whole[without], base[without], "rows without an adapter")
    exact = base[:32].double().clone()
    for row, slot in enumerate(index[:32].tolist()):
        if slot != lora.NONE:
            a = place.normal(sizes.rank, k, seed=2 + slot, scale=k**-0.5).double()
            b = place.normal(n, sizes.rank, seed=12 + slot).double()
            exact[row] += (0.25 + slot) * (b @ (a @ x[row].double()))
    ledger.close(whole[:32], exact, place.limit(single=2e-6))
