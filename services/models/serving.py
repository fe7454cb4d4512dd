"""Which model a stack serves: a name or a folder -> the settings by which gateway and worker are told.

What was named wins over what the environment says of models; other settings of the environment win over what suits the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from services.models.adding import add_model
from services.models.catalogue import KNOWN, SHIPPED
from services.models.faults import ModelFault
from shared.config import POCKET
from shared.protocol.chain import GRID

_WORKER: Final = "BURSTLINE_WORKER_"
_KV_BYTES: Final = 512 << 20
"""Of keys and values on the CPU, where a worker takes them at its start: the models that people have are larger than the one
that ships, for which its defaults are made."""
_MOST_BLOCKS: Final = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model and the variables that say it."""

    name: str
    folder: Path
    decisive: Mapping[str, str]
    """Set whatever the environment says."""
    suited: Mapping[str, str]
    """Set unless the environment says otherwise."""


def serve(model: str) -> str:
    """Have this process's children serve `model`: a name of the catalogue, which is fetched unless it is here, the model that
    ships, or a Hugging Face folder. Its name in requests.

    Raises:
        ModelFault: it is neither, or cannot be fetched or read.
    """
    found = served(model)
    for name, value in found.suited.items():
        os.environ.setdefault(name, value)
    os.environ.update(found.decisive)
    return found.name


def served(model: str) -> Served:
    """What `serve` sets. Raises as it does."""
    name, folder = _found(model)
    suited = {} if name == SHIPPED else {f"{_WORKER}NUM_BLOCKS": str(_blocks(folder))}
    if not _has_head(folder):
        suited[f"{_WORKER}DRAFTER"] = "ngram"
    return Served(
        name=name,
        folder=folder,
        decisive={
            "BURSTLINE_GATEWAY_MODELS": f"{name}={folder}",
            f"{_WORKER}MODEL_FOLDER": str(folder),
            f"{_WORKER}MODEL_NAME": name,
        },
        suited=suited,
    )


def _found(model: str) -> tuple[str, Path]:
    if model == SHIPPED:
        return SHIPPED, POCKET
    if model in KNOWN:
        return model, add_model(model)
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        names = ", ".join(sorted((SHIPPED, *KNOWN)))
        raise ModelFault(f"{model!r} is neither a model ({names}) nor a folder with a config.json")
    if "," in str(folder) or "=" in folder.name:
        raise ModelFault(
            f"{folder}: a comma in the path or an equals sign in the name would be misread; rename it"
        )
    return folder.name, folder


def _blocks(folder: Path) -> int:
    """Blocks of KV: what fits `_KV_BYTES`, though one whole window at least; on a card 0, which means as many as fit there.
    A config that says too little is the worker's to refuse: then the least."""
    if os.environ.get(f"{_WORKER}DEVICE") == "cuda":
        return 0
    context = os.environ.get(f"{_WORKER}MAX_CONTEXT", "")
    least = -(-(int(context) if context.isdecimal() else 4096) // GRID)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        fitting = _KV_BYTES // (_row_bytes(config.get("text_config", config)) * GRID)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        fitting = least
    return max(least, min(fitting, _MOST_BLOCKS))


def _row_bytes(config: Mapping[str, Any]) -> int:
    """Of one token's keys and values in float32, in all layers that have them; more than latent attention takes."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    return int(sum(kind != "linear_attention" for kind in kinds) * 2 * heads * width * 4)


def _has_head(folder: Path) -> bool:
    """Whether the weights hold an MTP head. Which weights are missing or broken is the worker's to say."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        else:
            with safe_open(single, framework="np") as file:
                names = set(file.keys())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelFault(f"{folder}: its weights are not readable: {error}") from error
    return any(name.startswith("mtp.") for name in names)
