"""Writes GGUF files as llama.cpp lays them out, small ones: the reverse of what services/models reads."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F32, Q4_1, Q8_0 = 0, 3, 8
ALIGNMENT: Final = 32
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 256
TEMPLATE: Final = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass
class Tensor:
    """`shape` as torch has it; `data` in the file's format."""

    shape: tuple[int, ...]
    format: int
    data: bytes


@dataclass
class GgufWriter:
    """Fields by name: (type, value), an array's type as (9, item type)."""

    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: int = 3

    def write(self, path: Path) -> Path:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.fields))
        for name, (kind, value) in self.fields.items():
            head += _string(name) + _field(kind, value)
        data = b""
        for name, tensor in self.tensors.items():
            data += bytes(-len(data) % ALIGNMENT)
            sizes = tuple(reversed(tensor.shape))
            head += _string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
            head += struct.pack("<IQ", tensor.format, len(data))
            data += tensor.data
        path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
        return path


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _field(kind: Any, value: Any) -> bytes:
    if isinstance(kind, tuple):
        _, item = kind
        return struct.pack("<IIQ", 9, item, len(value)) + b"".join(_plain(item, one) for one in value)
    return struct.pack("<I", kind) + _plain(kind, value)


def _plain(kind: int, value: Any) -> bytes:
    return (
        _string(value)
        if kind == 8
        else struct.pack("<" + {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}[kind], value)
    )


def f32(values: Floats) -> Tensor:
    return Tensor(values.shape, F32, values.astype("<f4").tobytes())


def q8_0(values: Floats) -> tuple[Tensor, Floats]:
    """Quantised, and what it stands for."""
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(1) / 127).astype(np.float16)
    codes = np.round(blocks / scale.astype(np.float32)[:, None]).clip(-127, 127).astype(np.int8)
    data = b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, codes, strict=True))
    return Tensor(values.shape, Q8_0, data), (scale.astype(np.float32)[:, None] * codes).reshape(values.shape)


def q4_1(values: Floats) -> tuple[Tensor, Floats]:
    """Quantised, and what it stands for."""
    blocks = values.reshape(-1, 32)
    least = blocks.min(1).astype(np.float16)
    scale = ((blocks.max(1) - blocks.min(1)) / 15).astype(np.float16)
    wide, low = scale.astype(np.float32)[:, None], least.astype(np.float32)[:, None]
    codes = np.round((blocks - low) / wide).clip(0, 15).astype(np.uint8)
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    data = b"".join(
        s.tobytes() + m.tobytes() + p.tobytes() for s, m, p in zip(scale, least, packed, strict=True)
    )
    return Tensor(values.shape, Q4_1, data), (codes * wide + low).astype(np.float32).reshape(values.shape)


def permuted(weight: Floats, heads: int) -> Floats:
    """Rows of a Hugging Face projection in GGUF's order (llama.cpp's convert_hf_to_gguf.py, `permute`)."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (three control tokens, the bytes, a few merged ones) and merges."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + place) for place in range(256 - len(letters))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o"]
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *letters,
        *(merge.replace(" ", "") for merge in merges),
    ]
    tokens += [f"zz{number}" for number in range(320 - len(tokens))]  # no text comes to them
    return tokens, merges


def fields() -> dict[str, tuple[Any, Any]]:
    """Of a small model with SmolLM2's layout."""
    tokens, merges = vocabulary()
    return {
        "general.architecture": (8, "llama"),
        "llama.block_count": (4, LAYERS),
        "llama.context_length": (4, CONTEXT),
        "llama.embedding_length": (4, HIDDEN),
        "llama.feed_forward_length": (4, INNER),
        "llama.attention.head_count": (4, HEADS),
        "llama.attention.head_count_kv": (4, KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
        "llama.rope.freq_base": (6, 100000.0),
        "llama.rope.dimension_count": (4, HIDDEN // HEADS),
        "tokenizer.ggml.add_bos_token": (7, False),
        "tokenizer.ggml.model": (8, "gpt2"),
        "tokenizer.ggml.pre": (8, "smollm"),
        "tokenizer.ggml.tokens": ((9, 8), tokens),
        "tokenizer.ggml.token_type": ((9, 5), [3] * 3 + [1] * (len(tokens) - 3)),
        "tokenizer.ggml.merges": ((9, 8), merges),
        "tokenizer.ggml.bos_token_id": (4, 1),
        "tokenizer.ggml.eos_token_id": (4, 2),
        "tokenizer.chat_template": (8, TEMPLATE),
    }


def llama(seed: int = 0) -> tuple[GgufWriter, Mapping[str, Floats]]:
    """A file with SmolLM2's mix of formats, and the Hugging Face weights that it stands for, in float32."""
    draw = np.random.default_rng(seed)
    vocab, head_dim = len(vocabulary()[0]), HIDDEN // HEADS
    writer, weights = GgufWriter(fields()), {}

    def normal(*shape: int) -> Floats:
        return (draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def put(theirs: str, ours: str, quantised: tuple[Tensor, Floats], heads: int = 0) -> None:
        writer.tensors[theirs], stands_for = quantised
        if heads:  # what the file holds is permuted: undo it by the inverse permutation of the rows
            rows = permuted(np.arange(len(stands_for), dtype=np.float32)[:, None], heads)[:, 0].astype(int)
            back = np.empty_like(stands_for)
            back[rows] = stands_for
            stands_for = back
        weights[ours] = stands_for

    put("token_embd.weight", "model.embed_tokens.weight", q8_0(normal(vocab, HIDDEN)))
    for index in range(LAYERS):
        at, to = f"blk.{index}.", f"model.layers.{index}."
        for theirs, ours in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            gain = 1 + normal(HIDDEN)
            put(f"{at}{theirs}.weight", f"{to}{ours}.weight", (f32(gain), gain))
        for theirs, ours, shape, heads in (
            ("attn_q", "self_attn.q_proj", (HIDDEN, HIDDEN), HEADS),
            ("attn_k", "self_attn.k_proj", (KV_HEADS * head_dim, HIDDEN), KV_HEADS),
            ("attn_v", "self_attn.v_proj", (KV_HEADS * head_dim, HIDDEN), 0),
            ("attn_output", "self_attn.o_proj", (HIDDEN, HIDDEN), 0),
            ("ffn_gate", "mlp.gate_proj", (INNER, HIDDEN), 0),
            ("ffn_up", "mlp.up_proj", (INNER, HIDDEN), 0),
            ("ffn_down", "mlp.down_proj", (HIDDEN, INNER), 0),
        ):
            put(f"{at}{theirs}.weight", f"{to}{ours}.weight", q4_1(normal(*shape)), heads)
    gain = 1 + normal(HIDDEN)
    put("output_norm.weight", "model.norm.weight", (f32(gain), gain))
    return writer, weights
