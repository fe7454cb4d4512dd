"""What a block drafter's config says, in the published DFlash, DFlash2 and DSpark layouts, and the maths behind it.

Sources: z-lab/dflash (model, test fixtures), deepseek-ai/DeepSpec (dspark), vllm-project/speculators (`sample_from_anchor`,
`draft_vocab_size` with `d2t`). What the fields and tensors mean, for P committed rows, anchor x_P, block of B slots, window W:

    c_t   = rms_norm(fc [tap_1(t); ..; tap_n(t)]; hidden_norm)       # t < P; tap j = output of layer target_layer_ids[j]
    x_0   = [emb(anchor), emb(mask) x (B - 1)]                       # at positions P .. P + B - 1; the target's embedding
    layer : a = rms_norm(x; input_layernorm);  x += C1(attention(C0(a)));  m likewise around the mlp (down(silu(gate) up))
    q     = rope(rms_norm(q_proj a; q_norm)),  k = rope(rms_norm(k_proj .; k_norm)),  v = v_proj .
            with k, v of the block's own rows `a` and of the context rows c_t (the same projections, no input norm)
    mask  : slot i sees context rows P + i - W < t < P, and slots j <= i if the layer is causal, else every slot
    scale = head_dim ** -0.5; norms multiply by w (ones at start), not by 1 + w; RoPE turns the whole head, halves paired
    y_i   = rms_norm(x_i; norm);  logits_i = soft_cap(output_multiplier * head(y_i))       # the target's head
    C_s   : out_i[c] = sum_tap (base_kernel[s, tap, c] + d_i[s, tap, c // group]) * in_{i - tap}[c], zero before slot 0;
            d_i = kernel_projection(a_i) viewed [2, taps, H / group], of the sublayer's normed input, for both sides

Harvest: *dflash* (`sample_from_anchor` false) slot k proposes the token at P + k, k = 1 .. B - 1; *dspark* (true) slot k
the token at P + k + 1, k = 0 .. B - 1. With `prev` = the token before the proposed one (the anchor at first):

    selector : among the `selector_top_k` largest logits, score(c) = logits_k[c]
               + <predecessor_codebook[prev] * hidden_projection(y_k), successor_codebook[c]>
    markov   : logits_k += markov_w2 markov_w1[prev]
    confidence : sigmoid(proj [y_k; markov_w1[prev]] + bias), without the second part if `confidence_head_with_markov` is false
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

from services.gpu_worker.engine.config import SLIDING, ModelDims
from services.gpu_worker.engine.models.fields import count, need, refuse
from services.gpu_worker.engine.models.rope import RopeScaling
from shared.errors import EngineFault

TOP_CANDIDATES: Final = 16
_NESTED: Final = ("dflash_config", "dspark_config")

_need = partial(need, of="drafter")
_count = partial(count, of="drafter")
_raise = partial(refuse, of="drafter")


class Harvest(StrEnum):
    """Which output row proposes which position; belongs to the checkpoint's family."""

    DFLASH = "dflash"
    DSPARK = "dspark"


_FAMILIES: Final[Mapping[str, Harvest]] = {
    "DFlashDraftModel": Harvest.DFLASH,
    "DFlash2DraftModel": Harvest.DFLASH,
    "Qwen3DSparkModel": Harvest.DSPARK,
    "DSparkDraftModel": Harvest.DSPARK,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDims:
    """Dimensions of a block drafter. Counts are elements, never bytes."""

    harvest: Harvest
    block: int
    """Slots of one pass: the anchor and the masks."""
    window: int
    taps: tuple[int, ...]
    """0-based trunk layers whose outputs it reads, ascending."""
    mask_token: int
    causal: bool
    """Whether a slot sees only the slots before it."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    """Ids that it can propose; below `vocab` the tensor `d2t` maps them."""
    eps: float
    rope_theta: float
    scaling: RopeScaling
    max_positions: int
    conv_taps: int = 0
    """Of the dynamic convolutions around each sublayer; 0 = there are none."""
    conv_group: int = 1
    selector_rank: int = 0
    selector_top: int = TOP_CANDIDATES
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    output_multiplier: float = 1.0
    logit_cap: float | None = None

    @property
    def drafts(self) -> int:
        """Most drafts of one pass."""
        return self.block - (self.harvest is Harvest.DFLASH)

    @property
    def tail_rows(self) -> int:
        """Context rows that are kept and exported: with them it drafts as with the whole history (R-D2)."""
        return self.window + self.block

    @property
    def tail_elements(self) -> int:
        """Of one exported tail: layers x rows x KV heads x head x (keys and values)."""
        return self.layers * self.tail_rows * self.kv_heads * self.head_dim * 2

    def check_target(self, dims: ModelDims, config: Mapping[str, Any] | None = None) -> None:
        """Raises EngineFault naming the field in which the drafter does not fit the trunk that it is to draft for."""
        layers = len(dims.layer_types)
        told = (config or {}).get("num_target_layers", layers)
        faults = {
            f"hidden_size {self.hidden}: the target's is {dims.hidden}": self.hidden != dims.hidden,
            f"vocab_size {self.vocab}: the target's is {dims.vocab}": self.vocab != dims.vocab,
            f"mask_token_id {self.mask_token} is outside the vocabulary": self.mask_token >= self.vocab,
            f"target_layer_ids {list(self.taps)}: the target has layers 0 to {layers - 1}": self.taps[-1]
            >= layers,
            f"num_target_layers {told}: the target has {layers}": told != layers,
        }
        _raise(faults)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BlockDims:
        """Read a drafter's `config.json`. Raises EngineFault naming the field that is missing, contradictory or outside
        what is computed."""
        said = _flat(config)
        rope = {**(said.get("rope_scaling") or {}), **(said.get("rope_parameters") or {})}
        _refuse(said)
        heads = _need(said, "num_attention_heads")
        harvest = _harvest(said)
        vocab = _need(said, "vocab_size")
        markov = _count(said, "markov_rank", 0)
        confidence = bool(said.get("enable_confidence_head", False))
        dims = cls(
            harvest=harvest,
            block=_need(said, "block_size"),
            window=_need(said, "sliding_window"),
            taps=_taps(said),
            mask_token=_count(said, "mask_token_id", None),
            causal=_causal(said),
            layers=_need(said, "num_hidden_layers"),
            hidden=_need(said, "hidden_size"),
            intermediate=_need(said, "intermediate_size"),
            heads=heads,
            kv_heads=_count(said, "num_key_value_heads", heads, least=1),
            head_dim=_count(said, "head_dim", _need(said, "hidden_size") // heads, least=1),
            vocab=vocab,
            draft_vocab=_count(said, "draft_vocab_size", vocab, least=1),
            eps=float(said.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", said.get("rope_theta", 10_000.0))),
            scaling=RopeScaling.from_hf(rope),
            max_positions=_need(said, "max_position_embeddings"),
            conv_taps=_count(said, "conv_kernel_size", 0),
            conv_group=_count(said, "conv_group_size", 1, least=1),
            selector_rank=_count(said, "selector_rank", 0),
            selector_top=_count(said, "selector_top_k", TOP_CANDIDATES, least=1),
            markov_rank=markov,
            confidence=confidence,
            confidence_with_markov=confidence and bool(said.get("confidence_head_with_markov", markov > 0)),
            output_multiplier=float(said.get("output_multiplier", 1.0)),
            logit_cap=float(said["final_logit_softcapping"]) if said.get("final_logit_softcapping") else None,
        )
        dims._check(said)
        return dims

    def _check(self, said: Mapping[str, Any]) -> None:
        types = said.get("layer_types")
        stay = [kind for kind in types or () if kind != SLIDING]
        dspark = self.harvest is Harvest.DSPARK
        faults = {
            f"layer_types: every layer must be {SLIDING!r}, since the kept tail is all that a restored drafter "
            f"has; found {stay[:1]}": types is None or bool(stay),
            f"layer_types names {len(types or ())} of {self.layers} layers": types is not None
            and len(types) != self.layers,
            f"block_size {self.block}: at least 2, at most the window": not 2 <= self.block <= self.window,
            f"num_attention_heads {self.heads} is no multiple of num_key_value_heads {self.kv_heads}": bool(
                self.heads % self.kv_heads
            ),
            f"head_dim {self.head_dim} is odd": bool(self.head_dim % 2),
            f"conv_group_size {self.conv_group} does not divide hidden_size {self.hidden}": bool(
                self.hidden % self.conv_group
            ),
            f"draft_vocab_size {self.draft_vocab} exceeds vocab_size": self.draft_vocab > self.vocab,
            "selector_rank and markov_rank: a drafter has one of them": bool(
                self.selector_rank and self.markov_rank
            ),
            "selector_rank belongs to dflash, sample_from_anchor to dspark": bool(
                self.selector_rank and dspark
            ),
            "selector_rank with a draft_vocab_size of its own is not computed": bool(
                self.selector_rank and self.draft_vocab != self.vocab
            ),
            "confidence_head_with_markov needs a markov_rank": self.confidence_with_markov
            and not self.markov_rank,
            "enable_confidence_head belongs to dspark": self.confidence and not dspark,
            "markov_rank belongs to dspark": bool(self.markov_rank) and not dspark,
        }
        _raise(faults)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Top-level fields and those of the nested drafter config as one; told twice, they must agree."""
    flat = dict(config)
    for nested in _NESTED:
        for name, value in (config.get(nested) or {}).items():
            if config.get(name) not in (None, value):
                raise EngineFault(f"drafter config: {name} is {config[name]!r} and, in {nested}, {value!r}")
            flat[name] = value
    return flat


def _refuse(said: Mapping[str, Any]) -> None:
    scale = said.get("input_embedding_scale")
    _raise(
        {
            f"hidden_act {said.get('hidden_act')!r}: only 'silu' is computed": said.get("hidden_act", "silu")
            != "silu",
            "attention_bias: projections with a bias are not computed": bool(said.get("attention_bias")),
            f"input_embedding_scale {scale!r}: the target's embedding is taken as it is": scale
            not in (None, 1, 1.0),
            f"markov_head_type {said.get('markov_head_type')!r}: only 'vanilla' is computed": said.get(
                "markov_head_type", "vanilla"
            )
            != "vanilla",
            "use_sliding_window is false, layer_types slide": said.get("use_sliding_window") is False,
        }
    )


def _harvest(said: Mapping[str, Any]) -> Harvest:
    """By family; `sample_from_anchor` must say the same."""
    names = [str(name) for name in said.get("architectures") or ()]
    family = next((_FAMILIES[name] for name in names if name in _FAMILIES), None)
    anchor = said.get("sample_from_anchor")
    if family is None and anchor is None:
        raise EngineFault(
            f"drafter config: architectures {names} is none of {sorted(_FAMILIES)}, and sample_from_anchor is not said"
        )
    flagged = None if anchor is None else Harvest.DSPARK if anchor else Harvest.DFLASH
    if None not in (family, flagged) and family is not flagged:
        raise EngineFault(f"drafter config: sample_from_anchor {anchor} contradicts architectures {names}")
    harvest = family or flagged
    assert harvest is not None
    return harvest


def _causal(said: Mapping[str, Any]) -> bool:
    """`is_causal` where it is said; a sliding layer is causal otherwise."""
    causal, free = said.get("is_causal"), said.get("sliding_window_non_causal")
    if causal is not None and free is not None and bool(causal) == bool(free):
        raise EngineFault(f"drafter config: is_causal {causal} contradicts sliding_window_non_causal {free}")
    if causal is not None:
        return bool(causal)
    return not free


def _taps(said: Mapping[str, Any]) -> tuple[int, ...]:
    taps = said.get("target_layer_ids")
    whole = isinstance(taps, list) and taps and all(isinstance(tap, int) and tap >= 0 for tap in taps)
    if not isinstance(taps, list) or not whole or sorted(set(taps)) != taps:
        raise EngineFault(
            f"drafter config: target_layer_ids must be layers from 0 on, ascending, not {taps!r}"
        )
    return tuple(taps)
