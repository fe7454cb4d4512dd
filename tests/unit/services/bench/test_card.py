"""The floors that figures of a card are told against."""

from __future__ import annotations

from services.bench import card
from services.gpu_worker.engine.placement import CARD_FOLD_ROWS


def test_a_step_moves_weights_states_and_rows() -> None:
    dims = card.shape("27b")
    one, many = (card.step_bytes(dims, batch, 512) for batch in (1, 64))
    state = dims.gdn_layers * dims.gdn_value_heads * dims.gdn_key_dim * dims.gdn_value_dim * 4
    rows = dims.attention_layers * 2 * dims.kv_heads * dims.head_dim * 2 * 513

    assert one == card.weight_bytes(dims) + state + state // CARD_FOLD_ROWS + rows
    assert many - one == 63 * (state + state // CARD_FOLD_ROWS + rows)


def test_float8_matrices_are_half_the_bytes() -> None:
    dims = card.shape("27b")
    vectors = 2 * card.weight_bytes(dims, item=1) - card.weight_bytes(dims, item=2)

    assert card.weight_item("card-fp8") == 1
    assert card.weight_item("card") == card.weight_item("free") == 2
    assert 0 < vectors < 0.001 * card.weight_bytes(dims)


def test_a_mixture_reads_no_more_experts_than_its_rows_ask_for() -> None:
    dims = card.shape("35b-a3b")

    assert card.weight_bytes(dims, rows=1) < 0.2 * card.weight_bytes(dims, rows=64)
    assert card.weight_bytes(dims, rows=64) == card.weight_bytes(dims, rows=10_000)
