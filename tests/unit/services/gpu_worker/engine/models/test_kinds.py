"""A config.json with a value of a wrong kind is refused by the field's name, whatever family would have read it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.checkpoint import Checkpoint
from services.gpu_worker.engine.models.kinds import MOST_COUNT, checked
from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from services.gpu_worker.engine.models.random_block import block_hf_config
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.models.random_next import next_hf_config, write_random_next
from services.gpu_worker.engine.models.registry import blueprint
from shared.errors import EngineFault

_WRONG: Final[tuple[Any, ...]] = (
    None, "x", -1, 0, 1.5, [], {}, 10**9, True, [None], ["x"], [-1], 1e308,
)  # fmt: skip

_WRITERS: Final[Mapping[str, Callable[[Path], Path]]] = {
    "qwen3_5": write_random_model,
    "qwen3_next": lambda folder: write_random_next(folder, next_hf_config(TINY)),
    "llama": lambda folder: write_random_dense(folder, dense_hf_config("llama")),
    "gemma3_text": lambda folder: write_random_dense(folder, dense_hf_config("gemma3_text")),
    "qwen3_moe": lambda folder: write_random_dense(folder, dense_hf_config("qwen3_moe")),
    "glm4_moe_lite": lambda folder: write_random_latent(folder, latent_hf_config("glm4_moe_lite")),
    "glm_moe_dsa": lambda folder: write_random_latent(folder, latent_hf_config("glm_moe_dsa")),
}


def _places(config: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from _places(value, (*before, name))


def _changed(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`config` with each field in turn of each wrong kind."""
    for place in _places(config):
        for value in _WRONG:
            changed = copy.deepcopy(dict(config))
            holder = changed
            for name in place[:-1]:
                holder = holder[name]
            holder[place[-1]] = value
            yield changed


@pytest.mark.parametrize("family", _WRITERS)
def test_a_config_of_wrong_kinds_is_refused_and_never_computed_with(family: str, tmp_path: Path) -> None:
    """What happens to be of a right kind passes; whatever is not is our own error, and no other."""
    folder = _WRITERS[family](tmp_path)
    checkpoint, refused = Checkpoint(folder), 0
    for changed in _changed(json.loads((folder / "config.json").read_text())):
        try:
            blueprint(folder, checked(changed), checkpoint)
        except EngineFault:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("dspark", [False, True])
def test_a_drafters_config_of_wrong_kinds_is_refused_and_never_computed_with(dspark: bool) -> None:
    heads = {"markov_rank": 8, "enable_confidence_head": True}
    changes = (
        {"architectures": ["Qwen3DSparkModel"], "dspark_config": heads, "dflash_config": {}} if dspark else {}
    )
    refused = 0
    for changed in _changed(block_hf_config(TINY, **changes)):
        try:
            BlockDims.from_hf(checked(changed)).check_target(TINY, changed)
        except EngineFault:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rms_norm_eps", "small", "rms_norm_eps must be a number over 0"),
        ("tie_word_embeddings", "false", "tie_word_embeddings must be true or false"),
        ("layer_types", "full_attention", "layer_types must be a list"),
        ("rope_parameters", {"rope_theta": -1}, "rope_parameters.rope_theta must be a number over 0"),
        ("rope_parameters", {"partial_rotary_factor": 2}, "partial_rotary_factor must be a number over 0 and at"),
        ("hidden_size", 10**9, f"not 1000000000 (at most {MOST_COUNT})"),
        ("hidden_size", True, "hidden_size must be a positive integer"),
        ("vocab_size", 1 << 20, "expected (1048576, "),
    ],
)  # fmt: skip
def test_the_field_is_named_with_its_limit(field: str, value: object, words: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(EngineFault) as refusal:
        load_model(folder)
    assert words in str(refusal.value)


def test_a_null_says_what_an_absent_field_says() -> None:
    config = {
        "rms_norm_eps": None,
        "rope_scaling": None,
        "final_logit_softcapping": None,
        "pad_token_id": None,
    }
    assert checked(config) == {"pad_token_id": None}
