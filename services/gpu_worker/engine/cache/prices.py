"""What a hit saves and what an entry weighs, from the model's dimensions. Pure arithmetic.

With c = FLOPs of a token that do not depend on its position, a prefix from row a to row b costs

    F(a, b) = (b - a) c + 2 n_attn n_q hd (b^2 - a^2)

since the row at position p attends to p rows, at 4 n_q hd FLOPs each (scores and values); in a layer with a window, to as
many as the window has, wherever it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gpu_worker.engine.config import BLOCK_ROWS, Latent, ModelDims

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """FLOPs and bytes of one model's cache."""

    token_flops: int  #: of one row, without its attention over earlier rows
    pair_flops: int  #: of one row attending to one earlier row, halved: the factor of b^2 - a^2
    block_bytes: int  #: one block of KV rows in all planes
    state_bytes: int  #: one snapshot with its window tails, and the hidden of the row before it

    @classmethod
    def of(cls, dims: ModelDims) -> Prices:
        """Prices of a model; multiply and add count as two."""
        hidden, heads = dims.hidden, dims.gdn_value_heads
        keys, values = dims.gdn_key_heads * dims.gdn_key_dim, heads * dims.gdn_value_dim
        cell = heads * dims.gdn_key_dim * dims.gdn_value_dim
        delta = 2 * hidden * (2 * keys + 2 * values + 2 * heads) + 8 * cell + 2 * values * hidden
        query, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        attention, pair = 2 * hidden * (2 * query + 2 * kv) + 2 * query * hidden, 2 * query
        if dims.latent is not None:
            attention, pair = _latent(dims, dims.latent)
        layers = len(dims.layer_types)
        plain = len([layer for layer in dims.dense_layers if layer < layers])
        mixed = dims.intermediate + dims.experts_per_row * dims.expert_width
        feed_forward = 6 * hidden * (plain * dims.dense_width + (layers - plain) * mixed)
        taps = (dims.conv_kernel - 1) * dims.conv_channels
        tail = 2 * max(0, dims.window - 1) * kv
        return cls(
            token_flops=dims.gdn_layers * delta
            + dims.attention_layers * attention
            + dims.window_layers * (attention + 4 * query * dims.window)
            + feed_forward,
            pair_flops=dims.attention_layers * pair,
            block_bytes=dims.planes * dims.row_size * BLOCK_ROWS * FLOAT_BYTES,
            state_bytes=(dims.gdn_layers * (cell + taps) + dims.window_layers * tail + hidden) * FLOAT_BYTES,
        )

    def flops(self, start: int, stop: int) -> int:
        """To compute rows start..stop-1 of a prompt."""
        return (stop - start) * self.token_flops + self.pair_flops * (stop * stop - start * start)

    def size(self, blocks: int, states: int) -> int:
        """Bytes."""
        return blocks * self.block_bytes + states * self.state_bytes

    def flops_per_byte(self, *, start: int, stop: int, blocks: int, states: int) -> float:
        """FLOPs that a hit at `stop` saves beyond one at `start`, over the bytes freed; 0 when none are."""
        size = self.size(blocks, states)
        return self.flops(start, stop) / size if size else 0.0


def _latent(dims: ModelDims, widths: Latent) -> tuple[int, int]:
    """FLOPs of a layer's products for a row, and of one row attending to one earlier row, halved: absorbed, as they are run."""
    queries = dims.heads * (widths.nope_dim + widths.rope_dim)
    inner = widths.query_rank or dims.hidden
    down = dims.hidden * (widths.query_rank + widths.rank + widths.rope_dim)
    absorbed = dims.heads * widths.rank * (widths.nope_dim + widths.value_dim)
    out = dims.heads * widths.value_dim * dims.hidden
    pair = dims.heads * (2 * widths.rank + widths.rope_dim)
    if widths.index is None:
        return 2 * (down + inner * queries + absorbed + out), pair
    narrow = widths.index.heads * widths.index.width
    index = dims.hidden * (widths.index.width + widths.index.heads) + inner * narrow
    return 2 * (down + inner * queries + absorbed + out + index), pair + narrow
