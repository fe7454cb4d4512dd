"""What the prefix cache holds before a cell runs. Each answers how many tokens the cell must find cached."""

from __future__ import annotations

from services.gpu_worker.engine.cache.entry import Entry
from services.gpu_worker.engine.requests import SamplingParams
from services.prove.driver import Driver
from services.prove.scene import Scene
from shared.errors import EngineFault
from shared.protocol.chain import GRID

TURN_TOKENS = 20
TURN_K = 3
TURN = SamplingParams(seed=9, temperature=1.0)


def cold(scene: Scene) -> int:
    """The cache is not asked and nothing is captured."""
    scene.change(use_cache=False)
    return 0


def miss(scene: Scene) -> int:
    """The cache is asked, holds nothing, and the run captures two boundaries."""
    scene.change(capture_at=GRID)
    return 0


def first(scene: Scene) -> int:
    """An entry at the first boundary."""
    scene.plant(scene.request.tokens, ckpt_at=GRID)
    return GRID


def halfway(scene: Scene) -> int:
    """An entry halfway, made by a conversation that goes on in another way."""
    middle = _middle(scene)
    scene.plant(scene.other_tail(middle), ckpt_at=middle)
    return middle


def deepest(scene: Scene) -> int:
    """Entries at the first and at the deepest boundary that this prompt can use."""
    scene.plant(scene.request.tokens, ckpt_at=scene.deepest, capture_at=GRID)
    return scene.deepest


def split(scene: Scene) -> int:
    """Rows shared with another conversation, no state where they part: a run splits there; the cell hits its work."""
    middle = _middle(scene)
    scene.plant(scene.other_tail(middle))
    scene.plant(scene.request.tokens, ckpt_at=middle)
    return middle


def evicted(scene: Scene) -> int:
    """Everything was evicted once and captured again."""
    scene.plant(scene.request.tokens, ckpt_at=scene.deepest, capture_at=GRID)
    scene.driver.engine.evict([scene.key_at(position) for position in (scene.deepest, GRID)])
    scene.plant(scene.request.tokens, ckpt_at=scene.deepest, capture_at=GRID)
    return scene.deepest


def next_turn(scene: Scene) -> int:
    """The turn before said something else after this prompt's beginning: its session is parked at its checkpoint, and
    the rows that it decoded are gone (C1.3)."""
    labels = ("session",)
    before = scene.request.tokens[: scene.deepest + 1]
    scene.plant(before, labels=labels, max_tokens=TURN_TOKENS, speculation_k=TURN_K, sampling=TURN)
    scene.change(labels=labels)
    return scene.deepest


def exact(scene: Scene) -> int:
    """The whole prompt, which ends on the grid: nothing is left to prime, the stored hidden decides the first token."""
    scene.plant(scene.request.tokens)
    return len(scene.request.tokens)


def spilled(scene: Scene) -> int:
    """What eviction took from the device lies in the host tier, and comes back from there."""
    scene.plant(scene.request.tokens, ckpt_at=scene.deepest, capture_at=GRID)
    _spill(scene, scene.driver)
    return scene.deepest


def another_workers(scene: Scene) -> int:
    """Another engine made the entries, with other chunks and another drafter, and spilled them. This one finds their
    checksummed copies in its host tier, in the place of its own; both trees name them alike."""
    other = scene.peer()
    for driver, k in ((scene.driver, 0), (other, TURN_K)):
        scene.plant(scene.request.tokens, driver, ckpt_at=scene.deepest, capture_at=GRID, speculation_k=k)
    entries, rows = _spill(scene, scene.driver), scene.driver.engine.path(scene.key_at(scene.deepest))
    for entry, foreign in zip(entries, _spill(scene, other), strict=True):
        entry.host = foreign.host
    for node, stranger in zip(rows, other.engine.path(scene.key_at(scene.deepest)), strict=True):
        node.host = stranger.host
    return scene.deepest


def _spill(scene: Scene, driver: Driver) -> list[Entry]:
    """Move the entries at the first and at the deepest boundary to the host tier; answers them."""
    keys = sorted({scene.key_at(position) for position in (scene.deepest, GRID)})
    moved = driver.engine.spill(keys)
    if moved != len(keys):
        raise EngineFault(f"{moved} of {len(keys)} entries moved to the host tier")
    entries = [driver.engine.path(key)[-1].entry for key in keys]
    return [entry for entry in entries if entry is not None]


def returned(scene: Scene) -> int:
    """The first boundary lost its state while its rows stayed, and a later prime brought the state back."""
    scene.plant(scene.other_tail(GRID), capture_at=GRID)
    scene.driver.engine.evict([scene.key_at(GRID)])
    scene.plant(scene.request.tokens, ckpt_at=GRID)
    return GRID


def _middle(scene: Scene) -> int:
    return max(GRID, scene.deepest // 2 // GRID * GRID)
