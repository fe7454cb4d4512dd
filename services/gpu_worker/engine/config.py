"""What the engine is built for: the model's dimensions and the sizes of its pools.

Pure values, which the families read from folders (`models`). Knows nothing of files, weights, torch or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from shared.errors import EngineFault

BLOCK_ROWS: Final = 64
"""Rows of a KV block, of a prefill tile and of a gated-delta chunk: the absolute grid of C1.2."""

LINEAR: Final = "linear_attention"
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyIndex:
    """Sparse attention: a row sees the `most` keys before it that a small index scores highest, or all if there are fewer."""

    heads: int
    width: int
    """Of an index key, which a row keeps, and of a head's index query."""
    most: int
    shared: tuple[int, ...] = ()
    """Layers that see what the nearest layer below with an index of its own chose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Widths of latent attention: a row keeps `rank` elements that all heads' keys and values are made from, and a key part
    of `rope_dim` that all heads share; behind them an index key if attention is sparse."""

    rank: int
    rope_dim: int
    nope_dim: int
    """Of a head's query and key, without the part that RoPE turns."""
    value_dim: int
    """Of a head's value."""
    query_rank: int = 0
    """Of the queries' own latent; 0 = they come straight from the hidden."""
    index: KeyIndex | None = None

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.rank + self.rope_dim + (self.index.width if self.index else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Dimensions of a decoder: what its layers are, and what a sequence keeps in each. Counts are elements, never bytes."""

    vocab: int
    hidden: int
    intermediate: int
    """Of the feed-forward layers; of a mixture's shared expert, 0 = there is none."""
    layer_types: tuple[str, ...]
    """One of `LINEAR`, `FULL`, `SLIDING` a layer, from the bottom up."""
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading elements of a head that RoPE turns; even."""
    rope_theta: float
    gdn_key_heads: int = 1
    gdn_value_heads: int = 1
    gdn_key_dim: int = 1
    gdn_value_dim: int = 1
    conv_kernel: int = 1
    eps: float
    tie_embeddings: bool
    max_positions: int
    has_mtp: bool
    window: int = 0
    """Keys that a row of a sliding layer sees, itself among them; 0 = there is no such layer."""
    experts: int = 0
    """Of a mixture in the place of the feed-forward layers; 0 = dense."""
    experts_per_row: int = 0
    expert_width: int = 0
    expert_weights_sum_to_one: bool = True
    """Whether the weights of a row's experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture model that have a plain feed-forward layer, `dense_width` wide; the MTP head's layer counts as the
    one after the last."""
    dense_width: int = 0
    latent: Latent | None = None
    """Of latent attention: `kv_heads` is 1 and `head_dim` the width of a row, which serves as key and as value."""

    @property
    def attention_layers(self) -> int:
        """Full-attention layers of the trunk; each owns one KV plane."""
        return self.layer_types.count(FULL)

    @property
    def gdn_layers(self) -> int:
        """Gated-delta layers of the trunk; each owns one recurrent and one conv state a slot."""
        return self.layer_types.count(LINEAR)

    @property
    def window_layers(self) -> int:
        """Sliding-window layers; each owns one plane of a slot's ring."""
        return self.layer_types.count(SLIDING)

    def within(self, rows: int) -> ModelDims:
        """The same for sequences of at most `rows`, which fill no wider window: what is kept of one is not wider."""
        return replace(self, window=min(self.window, rows))

    def mixes(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return bool(self.experts) and layer not in self.dense_layers

    @property
    def planes(self) -> int:
        """KV planes: the attention layers, then the draft plane of the MTP head if there is one."""
        return self.attention_layers + int(self.has_mtp)

    @property
    def draft_plane(self) -> int:
        """Index of the MTP head's KV plane. Raises `EngineFault` without an MTP head."""
        if not self.has_mtp:
            raise EngineFault("this model has no MTP head, hence no draft plane")
        return self.attention_layers

    @property
    def row_size(self) -> int:
        """Elements of one KV row in one plane."""
        return (1 if self.latent else 2) * self.kv_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys and values of the delta rule."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes of the engine's pools and launches. Raises `EngineFault` on values that cannot work together."""

    num_blocks: int
    """KV blocks of `BLOCK_ROWS` rows, shared by all sequences and cache entries; 0 = as many as a card has room for."""
    num_slots: int
    """Live sequences: recurrent states that verify may advance."""
    num_snapshots: int
    """Kept recurrent states (prefix tree, captures, checkpoints)."""
    max_verify: int = 8
    """Most columns of one verify: the anchor and `max_verify - 1` drafts."""
    max_batch: int = 8
    """Most sequences of one verify."""
    prefill_chunk: int = 512
    """Most rows of one prefill launch of a sequence; a multiple of `BLOCK_ROWS`."""
    threads: int = 1
    """Intra-op threads on the CPU."""
    max_context: int = 4096
    """Most rows of one sequence, prompt and completion together."""
    host_tier_bytes: int = 0
    """Host memory for entries that give way on the device; 0 = they are evicted at once."""
    device: str = "cpu"
    """cpu or cuda: where a model that is given as a folder is loaded."""
    dtype: str | None = None
    """Of its weights, activations and KV; null = float32 on the CPU, bfloat16 on a card."""
    drafter_folder: str | None = None
    """A block drafter of the published layouts beside the model; null = there is none."""
    draft_vocab: int = 0
    """On a card the MTP head proposes among so many ids from the first on; 0 = among all."""

    def __post_init__(self) -> None:
        for name in (
            "num_slots",
            "max_verify",
            "max_batch",
            "prefill_chunk",
            "threads",
            "max_context",
        ):
            if getattr(self, name) < 1:
                raise EngineFault(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_blocks < (0 if self.device.startswith("cuda") else 1):
            raise EngineFault(
                f"num_blocks must be at least 1 (0 = what fits, on a card), not {self.num_blocks}"
            )
        for name in ("num_snapshots", "host_tier_bytes"):
            if getattr(self, name) < 0:
                raise EngineFault(f"{name} must not be negative, not {getattr(self, name)}")
        if self.prefill_chunk % BLOCK_ROWS:
            raise EngineFault(f"prefill_chunk {self.prefill_chunk} is no multiple of {BLOCK_ROWS}")
        if self.max_batch > self.num_slots:
            raise EngineFault(f"max_batch {self.max_batch} exceeds num_slots {self.num_slots}")

    @property
    def block_rows(self) -> int:
        """Rows of a KV block, a constant of the design."""
        return BLOCK_ROWS
