"""Runs cells: alone, or sixteen that share one engine, come at random steps and leave when they end."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.events import SpecTelemetry
from services.prove.axes import BURSTS, CACHES, CHUNKS, COMPANIES, DRAFTERS, POLICIES, WAYS, Cell
from services.prove.compare import Exam, Verdict, crashed, judge
from services.prove.cover import drawn
from services.prove.driver import Driver, WatchedEngine
from services.prove.models import MODELS
from services.prove.reference import References, plain_request
from services.prove.rules import RULES, TOP
from services.prove.scene import Scene
from services.prove.script import Script
from shared.protocol.chain import chain

MOST_TOGETHER: Final = max(COMPANIES.values())
ARRIVAL_STEPS: Final = 14
"""Sixteen requests come within so many steps, so that some still prime while the first ones leave."""
MAX_VERIFY: Final = 8
CONTEXT: Final = 1280
HOST_BYTES: Final = 2**26
PEER_CHUNK: Final = 192
"""Of the other worker: none of those that cells have."""
BLOCKS_A_CELL: Final = 2 * CONTEXT // BLOCK_ROWS
"""Rows of a cell, of its neighbour, and of what its plants left."""

Setting = tuple[str, str, str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One cell that was run."""

    cell: Cell
    verdict: Verdict
    telemetry: SpecTelemetry
    cached_tokens: int


def setting(cell: Cell) -> Setting:
    """Cells that may share an engine, and whether they run together."""
    return cell.model, cell.chunk, cell.burst, cell.policy, cell.company


def groups(cells: Iterable[Cell], seed: int) -> Iterator[list[Cell]]:
    """Cells that run at once. A company that is not full is filled with drawn cells, which are compared as well; they
    ask what planned cells ask, so that no more references are needed."""
    draw = random.Random(seed)
    planned = sorted(cells, key=setting)
    for _, together in itertools.groupby(planned, key=setting):
        alike = list(together)
        size = COMPANIES[alike[0].company]
        peers = [cell for cell in planned if cell.model == alike[0].model]
        for first in range(0, len(alike), size):
            group = alike[first : first + size]
            while len(group) < size:
                group.append(_filler(alike[0], draw.choice(peers), draw))
            yield group


def _filler(like: Cell, asked: Cell, draw: random.Random) -> Cell:
    """A drawn cell of the setting of `like` that asks what `asked` asks."""
    fixed = {name: getattr(like, name) for name in ("model", "chunk", "burst", "policy", "company")}
    return drawn(fixed | {name: getattr(asked, name) for name in ("prompt", "rule", "budget")}, draw)


class Stage:
    """Keeps one engine as long as the setting stays, so that a cell runs in memory that others have used."""

    def __init__(self, references: References, seed: int) -> None:
        self._references = references
        self._seed = seed
        self._setting: Setting | None = None
        self._driver: Driver | None = None
        self.happened: Counter[str] = Counter()  #: events of all cells, by kind
        self._script = Script()
        self._peers: dict[str, Driver] = {}
        self._run = 0

    def play(self, group: list[Cell]) -> list[Outcome]:
        """Run a group and compare each of its cells. An engine that fails is a difference of every cell in it."""
        scenes: list[Scene] = []
        driver = self._driver_for(group[0])
        try:
            scenes = [self._scene(driver, cell, len(group)) for cell in group]
            planted = [CACHES[cell.cache](scene) for cell, scene in zip(group, scenes, strict=True)]
            self._perform(driver, list(zip(group, scenes, strict=True)))
            outcomes = [
                self._judge(driver, cell, scene, cached)
                for cell, scene, cached in zip(group, scenes, planted, strict=True)
            ]
            for one in (driver, *self._peers.values()):
                one.clear()
                one.records.clear()
        except Exception as fault:  # noqa: BLE001 - a crash is a finding, and the other cells still count
            self._setting = None
            self._peers.clear()
            return [_crashed(cell, fault) for cell in group]
        finally:
            self._script.clear()
            self.happened.update(driver.happened)
            self.happened["Mixed company"] += len({RULES[cell.rule].sampling.greedy for cell in group}) > 1
            driver.happened.clear()
        return outcomes

    def _driver_for(self, cell: Cell) -> Driver:
        key = (*setting(cell)[:4], "")
        if self._driver is None or key != self._setting:
            config = _config(MOST_TOGETHER, chunk=CHUNKS[cell.chunk])
            limits = POLICIES[cell.policy].limits(BURSTS[cell.burst])
            engine = WatchedEngine(config, MODELS[cell.model](), limits=limits, faults=self._script)
            self._driver = Driver(engine)
            self._setting = key
        return self._driver

    def _peer(self, model: str) -> Driver:
        """An engine of another worker; kept like the other one."""
        if model not in self._peers:
            self._peers[model] = Driver(WatchedEngine(_config(1, chunk=PEER_CHUNK), MODELS[model]()))
        return self._peers[model]

    def _scene(self, driver: Driver, cell: Cell, company: int) -> Scene:
        self._run += 1
        rng = random.Random(f"{self._seed}/{self._run}/{cell}")
        root = hashlib.sha256(f"{self._run}".encode()).digest()
        plain, drafting, expected = plain_request(cell), DRAFTERS[cell.drafter], self._references.of(cell)
        scene = Scene(
            driver=driver,
            peer=lambda: self._peer(cell.model),
            script=self._script,
            request=plain,
            expected=expected,
            arrival=rng.randrange(ARRIVAL_STEPS) if company > 1 else 1,
            rng=rng,
        )
        scene.change(
            request_id=f"cell-{self._run}",
            root=root,
            chain=chain(root, plain.tokens),
            use_cache=True,
            emitted=tuple(expected.tokens) if drafting.journal else (),
            top_logprobs=TOP if RULES[cell.rule].logprobs else None,
            **drafting.fields(),
        )
        return scene

    @staticmethod
    def _perform(driver: Driver, cast: list[tuple[Cell, Scene]]) -> None:
        driver.steps = 0
        for cell, scene in cast:
            WAYS[cell.way](scene)
            driver.at(scene.arrival, _submission(driver, scene))
        driver.run()

    def _judge(self, driver: Driver, cell: Cell, scene: Scene, cached: int) -> Outcome:
        request, references = scene.request, self._references
        got = driver.records[request.key]
        cached = max(cached, got.cached_tokens) if scene.shared else cached
        exam = Exam(
            cell=cell,
            request_id=request.request_id,
            prompt_tokens=len(request.tokens),
            known=len(request.emitted),
            logprobs=request.top_logprobs is not None,
            cached_tokens=cached,
            gap=lambda index, expected, got: references.gap(cell, index, expected, got),
        )
        verdict = judge(exam, scene.expected, got)
        return Outcome(
            cell=cell,
            verdict=verdict,
            telemetry=got.end.telemetry,
            cached_tokens=got.cached_tokens,
        )


def _config(together: int, *, chunk: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=together * BLOCKS_A_CELL,
        num_slots=together,
        num_snapshots=4 * together,
        max_verify=MAX_VERIFY,
        max_batch=together,
        prefill_chunk=chunk,
        max_context=CONTEXT,
        host_tier_bytes=HOST_BYTES,
    )


def _submission(driver: Driver, scene: Scene) -> Callable[[], None]:
    return lambda: driver.submit(scene.request)


def _crashed(cell: Cell, fault: Exception) -> Outcome:
    return Outcome(cell=cell, verdict=crashed(cell, fault), telemetry=SpecTelemetry(), cached_tokens=0)
