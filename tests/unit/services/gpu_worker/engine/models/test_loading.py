"""Loading in turn: memory while a model is built, progress, float8 scales, and tensors that do not belong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from services.gpu_worker.engine.config import FULL, LINEAR
from services.gpu_worker.engine.models import loader
from services.gpu_worker.engine.models.checkpoint import Checkpoint, Weights
from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.models.random_next import EXPERTS, next_hf_config, write_random_next
from shared.errors import EngineFault
from tests.unit.services.gpu_worker.engine.rig import Rig, table_of, tokens

HEAD = "model.layers.4.shared_head.head.weight"


class LiveBytes(TorchDispatchMode):
    """The largest sum of bytes of tensors that live at once, of those that operations make and files give."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor):
                self.note(made)
        return out

    def note(self, made: Tensor) -> None:
        """Packed weights of a library have no storage that can be seen: tests pick the recipe that has."""
        storage = made.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {at: kept for at, kept in self._storages.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))


DEEP = {
    "hybrid": lambda at: write_random_model(
        at, replace(TINY, layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 4, vocab=256)
    ),
    "llama": lambda at: write_random_dense(
        at, dense_hf_config("llama", num_hidden_layers=16, vocab_size=256)
    ),
    "next": lambda at: write_random_next(
        at,
        next_hf_config(replace(TINY, layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 4, vocab=256), **EXPERTS),
    ),
    "latent": lambda at: write_random_latent(
        at,
        latent_hf_config(num_hidden_layers=16, mlp_layer_types=["dense"] + ["sparse"] * 15, vocab_size=256),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", DEEP)
def test_weights_never_lie_in_memory_twice(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment more than 1.2 times the model, and what was read is let go of."""
    folder = DEEP[family](tmp_path)
    stored = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")
    model_bytes = 4 * sum(tensor.numel() for tensor in stored.values())
    monkeypatch.setattr("kernels.matmul.choose_recipe", lambda _: "tiled")
    live, read = LiveBytes(), Weights._tensor

    def noted(self: Weights, name: str) -> Tensor:
        tensor = read(self, name)
        live.note(tensor)
        return tensor

    monkeypatch.setattr(Weights, "_tensor", noted)
    with live:
        model = load_model(folder)
    assert model.dims.hidden == 64
    assert 0.8 * model_bytes < live.peak <= 1.2 * model_bytes


def test_progress_tells_every_byte_once(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    told: list[tuple[int, int]] = []
    load_model(folder, progress=lambda read, total: told.append((read, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert told[-1] == (total, total)
    assert [read for read, _ in told] == sorted({read for read, _ in told})


def test_the_log_tells_each_tenth_of_a_large_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=loader.__name__)
    load_model(write_random_model(tmp_path / "small"))
    assert not caplog.messages
    monkeypatch.setattr(loader, "_WORTH_TELLING", 1)
    load_model(write_random_model(tmp_path / "large"))
    assert caplog.messages[-1].startswith("loading large: 100 %")
    assert 5 <= len(caplog.messages) <= 10


@pytest.mark.parametrize(
    ("write", "extra"),
    [
        (lambda at: write_random_model(at), "model.layers.1.self_attn.q_proj.bias"),
        (lambda at: write_random_model(at), "model.layers.4.input_layernorm.weight"),
        (
            lambda at: write_random_dense(at, dense_hf_config("llama")),
            "model.layers.0.self_attn.q_norm.weight",
        ),
        (lambda at: write_random_dense(at, dense_hf_config("llama")), "score.weight"),
        (
            lambda at: write_random_latent(at, latent_hf_config()),
            "model.layers.1.self_attn.indexer.wk.weight",
        ),
        (lambda at: write_random_next(at, next_hf_config()), "model.layers.0.linear_attn.in_proj_z.weight"),
    ],
)
def test_tensors_that_do_not_belong_are_named(
    write: Callable[[Path], Path], extra: str, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {extra: torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(EngineFault, match=f"1 tensors that this model does not have, the first is {extra}"):
        load_model(folder)


def test_copies_of_a_shared_embedding_and_head_are_welcome_and_others_are_not(tmp_path: Path) -> None:
    folder = write_random_latent(tmp_path, latent_hf_config())
    weights = load_file(folder / "model.safetensors")
    digest = load_model(folder).weights_digest
    copies = {HEAD: "lm_head.weight", "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight"}
    whole = weights | {copy: weights[name].clone() for copy, name in copies.items()}
    save_file(whole, folder / "model.safetensors")
    assert load_model(folder).weights_digest == digest
    whole[HEAD][3, 5] += 1.0
    save_file(whole, folder / "model.safetensors")
    with pytest.raises(EngineFault, match=rf"{HEAD} differs from lm_head\.weight"):
        load_model(folder)


def test_a_tied_head_may_be_stored_once_more(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, replace(TINY, tie_embeddings=True))
    weights, digest = load_file(folder / "model.safetensors"), load_model(folder).weights_digest
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    assert load_model(folder).weights_digest == digest


def test_a_file_that_the_index_names_must_be_there_and_hold_the_tensor(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    index = {name: "model.safetensors" for name in weights} | {"model.norm.weight": "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(EngineFault, match=r"other\.safetensors: not readable as safetensors"):
        load_model(folder)
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(EngineFault, match=r"other\.safetensors: tensor model\.norm\.weight is not readable"):
        load_model(folder)


BLOCK = (48, 32)


def _quantised(weights: dict[str, Tensor], scales: str) -> dict[str, Tensor]:
    """Every matrix of a layer in float8: scaled a block, a row or a tensor at a time."""
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dim() != 2 or ".layers." not in name or "mlp.gate." in name:
            out[name] = tensor
            continue
        rows, columns = tensor.shape
        if scales == "block":
            padded = torch.nn.functional.pad(tensor, (0, -columns % BLOCK[1], 0, -rows % BLOCK[0]))
            grid = padded.unflatten(1, (-1, BLOCK[1])).unflatten(0, (-1, BLOCK[0])).abs().amax((1, 3)) / 448
            wide = grid.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
            out[name + "_scale_inv"] = grid
        elif scales == "row":
            wide = tensor.abs().amax(1, keepdim=True) / 448
            out[name + "_scale"] = wide.to(torch.bfloat16)
            wide = out[name + "_scale"].float()
        else:
            wide = tensor.abs().amax() / 448
            out[name + "_scale"] = wide.clone()
            out[name.removesuffix("weight") + "input_scale"] = torch.ones(())
        out[name] = (tensor / wide).to(torch.float8_e4m3fn)
    return out


def _widened(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the quantised tensors mean, element by element."""
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dtype != torch.float8_e4m3fn:
            if not name.endswith("scale") and not name.endswith("scale_inv"):
                out[name] = tensor
            continue
        blocks = weights.get(name + "_scale_inv")
        scale = weights[name + "_scale"].float() if blocks is None else blocks
        if blocks is not None:
            rows, columns = (
                torch.arange(size) // step for size, step in zip(tensor.shape, BLOCK, strict=True)
            )
            scale = blocks[rows][:, columns]
        out[name] = tensor.float() * scale
    return out


@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
@pytest.mark.parametrize("family", ["llama", "latent"])
def test_float8_weights_are_widened_by_their_scales(family: str, scales: str, tmp_path: Path) -> None:
    """The same bits as a folder that holds the products."""
    config = dense_hf_config("llama") if family == "llama" else latent_hf_config()
    write = write_random_dense if family == "llama" else write_random_latent
    eight, whole = write(tmp_path / "eight", config, seed=2), write(tmp_path / "whole", config, seed=2)
    quantised = _quantised(load_file(eight / "model.safetensors"), scales)
    save_file(quantised, eight / "model.safetensors")
    save_file(_widened(quantised), whole / "model.safetensors")
    method = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    (eight / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    hidden = [Rig(load_model(folder)).start(0, table_of(0)).prefill(tokens(70)) for folder in (eight, whole)]
    assert torch.equal(*hidden)


def _break(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    quantised = _quantised(load_file(folder / "model.safetensors"), "block")
    save_file(change(quantised), folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if k != Q + "_scale_inv"}, f"{Q} is float8 without a tensor"),
        (lambda w: w | {Q + "_scale_inv": torch.ones(5, 5)}, rf"{Q}_scale_inv is F32 of shape \(5, 5\)"),
        (lambda w: w | {Q + "_scale_inv": torch.ones(3, 2, dtype=torch.int32)}, f"{Q}_scale_inv is I32"),
        (lambda w: w | {Q: torch.zeros(128, 64).to(torch.float8_e5m2)}, f"tensor {Q} is F8_E5M2, expected"),
        (lambda w: w | {"model.norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}, "float8 without a"),
    ],
)
def test_wrong_scales_are_named(change: Any, message: str, tmp_path: Path) -> None:
    config = dense_hf_config("llama")
    folder = write_random_dense(tmp_path, config)
    _break(folder, change)
    method = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(EngineFault, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format 'pack-quantized'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive"),
    ],
)
def test_other_quantisations_are_refused(quantised: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = dense_hf_config("llama")
    folder = write_random_dense(tmp_path, config)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    with pytest.raises(EngineFault, match=message):
        load_model(folder)


def test_a_digest_is_of_all_tensors_whoever_asked(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    with Checkpoint(folder).open(shapes) as some, Checkpoint(folder).open(shapes) as none:
        assert len(some) == len(shapes)
        for name in list(some)[::2]:
            assert some[name].shape == shapes[name]
        assert some.digest() == none.digest() == load_model(folder).weights_digest
