"""A GGUF file -> a Hugging Face folder: config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json,
tokenizer_config.json and a notice of whose work it is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.models import bfloat16
from services.models.catalogue import Known
from services.models.gguf import GgufFile
from services.models.llama import layout
from services.models.wording import tokenizer, tokenizer_config

NOTICE = "NOTICE"


def convert(
    source: Path,
    known: Known,
    folder: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill the empty `folder` from the file `source` and have it on the disk. `progress` gets bytes of weights: written, all.

    Raises:
        ModelFault: the file is not what it should be; names the field or tensor.
        OSError: no room, or no right to write.
    """
    with GgufFile(source) as file:
        model = layout(file)
        ids = {name: model.config[name] for name in ("bos_token_id", "eos_token_id")}
        _write_json(folder / "config.json", model.config)
        _write_json(folder / "generation_config.json", {**ids, **known.generation})
        _write_json(folder / "tokenizer.json", tokenizer(file), indent=None)
        _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
        _write(folder / NOTICE, _notice(known))
        total, written = sum(map(math.prod, model.shapes.values())) * 2, 0

        def count(size: int) -> None:
            nonlocal written
            written += size
            progress(written, total)

        bfloat16.write(folder / "model.safetensors", model.shapes, model.read, done=count)


def _notice(known: Known) -> str:
    package = known.package
    return (
        f"{known.origin}.\nLicence: {known.licence}.\n\n"
        f"Fetched as the package {package.requirement}, its file {package.member}\n"
        f"(SHA-256 {package.member_digest}),\nand written as bfloat16 by `burstline model add {known.name}`. "
        "The quantised weights are unchanged but for that rounding.\n"
    )


def _write_json(path: Path, value: dict[str, Any], *, indent: int | None = 2) -> None:
    _write(path, json.dumps(value, ensure_ascii=False, indent=indent) + "\n")


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
