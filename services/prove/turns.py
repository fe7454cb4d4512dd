"""Turns that go on from what the turn before decoded, `reuse = "decode"` (C1.3): no cold run is their reference, but the
same history is. Whoever computes it, in any company, with any drafter, gives the same bits.

The reference is a conversation of three turns, alone, without a drafter, one round a burst, the smallest chunks. A trial
has the same conversation in another way; each turn of it is compared, and each must have gone on from the one before.
A fourth request asks for the same prompt without having opted in, and is compared with a cold run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from services.gpu_worker.engine.requests import GenerateRequest
from services.prove.axes import DRAFTERS
from services.prove.compare import Verdict, judge_trial
from services.prove.driver import Driver, Record, WatchedEngine
from services.prove.models import MODELS
from services.prove.prompts import prompt
from services.prove.rules import RULES, TOP
from services.prove.script import Script
from services.prove.small import drafting, pools
from services.prove.trial import Trial
from shared.errors import EngineFault
from shared.protocol.chain import chain

ROOT: Final = b"\x51" * 32
OTHER_ROOT: Final = b"\x52" * 32
SAID: Final = 26
OPENING: Final = 70
TAILS: Final = (90, 5)
"""New tokens of the turns after the first: over the next grid position, and short of one."""
COMPANY: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How a conversation is had. `gives_way` = rows at which the second and the third turn are set aside; `spilled`:
    what waits for the next turn lies in the host tier meanwhile."""

    drafter: str = "none"
    chunk: int = 64
    rounds: int = 1
    company: int = 0
    gives_way: tuple[int, ...] = ()
    checkpoints: int = 1
    spilled: bool = False

    def __str__(self) -> str:
        parts = [self.drafter, f"chunk {self.chunk}", f"{self.rounds} rounds"]
        parts += [f"{self.company} others"] if self.company else []
        parts += [f"set aside {len(self.gives_way)} times"] if self.gives_way else []
        parts += ["no checkpoints"] if not self.checkpoints else []
        parts += ["in the host tier"] if self.spilled else []
        return ", ".join(parts)


PLAIN: Final = Manner()
MANNERS: Final = (
    Manner(drafter="mtp K=3", rounds=7, chunk=512),
    Manner(drafter="mtp K=5", rounds=2, company=COMPANY),
    Manner(drafter="n-gram K=7", rounds=7, chunk=128, spilled=True),
    Manner(drafter="mtp K=2", rounds=2, gives_way=(100, 130, 200, 230)),
    Manner(drafter="none", rounds=2, gives_way=(120, 190, 240), checkpoints=0, company=COMPANY),
    Manner(drafter="mtp K=1", rounds=1, spilled=True, gives_way=(210,), company=COMPANY),
)
QUICK: Final = MANNERS[2:4]


class TurnsEngine(WatchedEngine):
    """Reaches what waits for a next turn."""

    def spill_turns(self) -> None:
        """Move it to the host tier."""
        for decoded in self._cache.decoded.parked:
            self._cache.decoded.spill(decoded)


def family(everything: bool, seed: int) -> list[Trial]:
    """See `families.Family`. Nothing is drawn, so the seed says nothing."""
    if not everything:
        return [_trial("tiny", "sampled", manner) for manner in QUICK] + [
            _trial("window", "sampled", QUICK[-1])
        ]
    return [
        _trial(model, rule, manner)
        for model in ("tiny", "pocket", "window")
        for rule in ("greedy, logprobs", "sampled", "greedy, penalties")
        for manner in MANNERS
    ]


def _trial(model: str, rule: str, manner: Manner) -> Trial:
    return Trial(
        name=f"{model} / {rule} / {manner}",
        run=lambda: tried(model, rule, manner),
        shares=f"{model} / {rule}",
    )


def tried(model: str, rule: str, manner: Manner) -> Verdict:
    """Have the conversation in a manner and compare every turn."""
    verdict = Verdict()
    got = conversation(model, rule, manner)
    for number, (expected, record) in enumerate(zip(reference(model, rule), got, strict=True), start=1):
        name = f"turn {number}: {model} / {rule} / {manner}"
        asked = number <= len(TAILS) + 1
        cached = expected.cached_tokens if asked else record.cached_tokens
        verdict.add(judge_trial(name, _bare(expected), _bare(record), cached_tokens=cached, logprobs=True))
        verdict.same("reuse", expected.end.reuse, record.end.reuse, name)
    return verdict


def _bare(record: Record) -> Record:
    """Without the draft plane: plain decode leaves its rows unwritten."""
    kept = replace(record.cache, draft=None) if record.cache is not None else None
    return replace(record, cache=kept)


@cache
def reference(model: str, rule: str) -> tuple[Record, ...]:
    """The conversation and the cold run, made once a process. Raises EngineFault when a turn did not go on from the one
    before: nothing would be shown."""
    *turns, _ = conversation(model, rule, PLAIN)
    if [turn.end.reuse for turn in turns] != ["exact", *("decode" for _ in TAILS)]:
        raise EngineFault("the reference conversation did not go on from what it decoded")
    cold = Driver(_engine(model, PLAIN, Script()))
    tokens = _prompt(turns)
    cold.run([replace(_request("cold", tokens, rule, PLAIN), reuse="exact", use_cache=False)])
    return *turns, cold.records["cold", 0]


def conversation(model: str, rule: str, manner: Manner) -> tuple[Record, ...]:
    """Records of the three turns, and of the last prompt asked for without having opted in."""
    script = Script()
    engine = _engine(model, manner, script)
    driver = Driver(engine)
    turns: list[Record] = []
    for number in range(len(TAILS) + 1):
        request = _request(f"turn-{number}", _prompt(turns), rule, manner)
        if turns:
            script.give_way_at(request.key, manner.gives_way)
        if manner.spilled:
            engine.spill_turns()
        driver.run([*_others(number, manner), request])
        turns.append(driver.records[request.key])
    plain = replace(_request("exact", _prompt(turns[:-1]), rule, manner), reuse="exact")
    driver.run([plain])
    engine.forget_turns()
    driver.clear()
    return *turns, driver.records[plain.key]


def _prompt(turns: Sequence[Record]) -> tuple[int, ...]:
    """Of the turn after these: all that was asked and said, and a tail."""
    tokens = prompt("on the grid")[:OPENING]
    for turn, tail in zip(turns, TAILS, strict=False):
        tokens = (*tokens, *turn.tokens, *prompt("long")[:tail])
    return tokens


def _request(name: str, tokens: tuple[int, ...], rule: str, manner: Manner) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        root=ROOT,
        tokens=tokens,
        chain=chain(ROOT, tokens),
        sampling=RULES[rule].sampling,
        max_tokens=SAID,
        reuse="decode",
        top_logprobs=TOP,
        **DRAFTERS[manner.drafter].fields(),
    )


def _others(turn: int, manner: Manner) -> Iterator[GenerateRequest]:
    """Strangers of another namespace, greedy and sampled."""
    for number in range(manner.company):
        tokens = prompt("long")[40 * number : 40 * number + 60 + 30 * turn]
        rule = RULES["sampled" if number % 2 else "greedy"]
        yield GenerateRequest(
            request_id=f"other-{turn}-{number}",
            root=OTHER_ROOT,
            tokens=tokens,
            chain=chain(OTHER_ROOT, tokens),
            sampling=rule.sampling,
            max_tokens=SAID,
            reuse="decode",
            **DRAFTERS[manner.drafter].fields(),
        )


def _engine(model: str, manner: Manner, script: Script) -> TurnsEngine:
    config = pools(streams=COMPANY + 1, rows=512, chunk=manner.chunk, snapshots=64, host_bytes=2**24)
    limits = drafting(manner.rounds, decode_ckpt_blocks=manner.checkpoints, max_decoded=16)
    return TurnsEngine(config, MODELS[model](), limits=limits, faults=script)
