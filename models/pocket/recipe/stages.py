"""The stages of the recipe: what each trains, from which weights, on which shards, for how long. Each is seeded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

SHIPPED: Final = "shipped"
Part = Literal["trunk", "mtp", "block"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run. `after` names the stage whose weights it starts from, SHIPPED those of the folder; `part` is what is trained,
    the rest stands still; `shares` are rows of a batch from the shards named; until `decay_from` of the run the rate is
    constant. `chain`: steps that the draft head is unrolled; `anchors`: blocks drawn from a row.
    """

    name: str
    after: str | None
    part: Part = "trunk"
    chain: int = 3
    anchors: int = 0
    steps: int
    length: int
    shares: dict[str, int]
    other_weight: float
    rate: float
    decay_from: float
    warmup: int = 100
    seed: int


STAGES: Final = {
    stage.name: stage
    for stage in (
        Stage(
            name="base", after=None, steps=3000, length=2048, shares={"text_train": 18, "chat_train": 14},
            other_weight=0.3, rate=4e-3, decay_from=0.6, seed=11,
        ),
        Stage(
            name="chat", after="base", steps=2800, length=2048, shares={"text_train": 6, "chat_train": 26},
            other_weight=0.1, rate=2e-3, decay_from=0.1, seed=12,
        ),
        Stage(
            name="mtp", after="chat", part="mtp", steps=2000, length=1024,
            shares={"text_train": 8, "chat_train": 14, "own_train": 10},
            other_weight=0.2, rate=4e-3, decay_from=0.3, seed=13,
        ),
        Stage(
            name="polish", after="mtp", steps=800, length=2048, shares={"text_train": 6, "chat_train": 26},
            other_weight=0.1, rate=1.2e-3, decay_from=0.1, warmup=20, seed=14,
        ),
        Stage(
            name="mtp_polish", after="polish", part="mtp", steps=700, length=1024,
            shares={"text_train": 8, "chat_train": 14, "own_train": 10},
            other_weight=0.2, rate=2e-3, decay_from=0.1, warmup=20, seed=15,
        ),
        Stage(
            name="mtp_five", after=SHIPPED, part="mtp", chain=5, steps=1800, length=1024,
            shares={"text_train": 4, "chat_train": 10, "own_prose": 10, "own_chat": 8},
            other_weight=0.1, rate=2e-3, decay_from=0.2, warmup=120, seed=16,
        ),
        Stage(
            name="block", after=SHIPPED, part="block", anchors=128, steps=6000, length=1024,
            shares={"text_train": 4, "chat_train": 10, "own_prose": 10, "own_chat": 8},
            other_weight=0.02, rate=4e-3, decay_from=0.4, warmup=200, seed=17,
        ),
    )
}  # fmt: skip
