"""A model that nobody here trained, with n-gram drafts: SmolLM2, when `burstline model add smollm2` has been run.

A trial is one engine. A few conversations run in it together, cold, and then again from what the cache kept; each is compared
with the same conversation alone, cold and without drafts. Few and short ones: on two slow cores it says some tokens a second.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.requests import GenerateRequest
from services.models.config import ModelSettings
from services.models.store import Store
from services.prove.axes import DRAFTERS
from services.prove.compare import Verdict, judge_trial
from services.prove.device import chosen
from services.prove.driver import Driver, Record, WatchedEngine
from services.prove.rules import RULES, TOP
from services.prove.small import drafting, pools
from services.prove.trial import Trial
from shared.protocol.chain import chain

NAME: Final = "smollm2"
ROOT: Final = b"\x54" * 32
SAID: Final = 20
SYSTEM: Final = (
    "You are a helpful assistant. Answer in one or two short sentences and use plain words. If you do not know an answer, say "
    "so. When you are asked to repeat something, repeat it word for word, and add nothing of your own."
)
CAST: Final = (
    ("Repeat: the gateway, the worker, the broker, the gateway, the worker, the broker.", "greedy, logprobs"),
    ("Name three things to see in Paris.", "sampled, truncated"),
    ("Count from one to nine: one, two, three, four,", "greedy, penalties"),
)
"""(question, rule)."""
MANNERS: Final = (("n-gram K=3", 128, 7), ("n-gram K=7", 64, 1))
"""(drafter, chunk, rounds a burst)."""


def absence() -> str:
    """Why there is nothing to try; "" = the model is here."""
    return "" if _store().has(NAME) else f"{NAME} is not here (burstline model add {NAME})"


def family(everything: bool, seed: int) -> list[Trial]:
    """See `families.Family`: of a whole run one trial, so that one process loads the model. Nothing is drawn."""
    if not everything or absence():
        return []
    return [Trial(name=NAME, run=lambda: tried(_store().path(NAME)))]


def tried(folder: Path) -> Verdict:
    """Every manner, the cast twice in one engine each, compared with the cast alone."""
    loaded, verdict = _loaded(folder), Verdict()
    prompts = _prompts(folder)
    plain = [_alone(loaded, prompts, number) for number in range(len(CAST))]
    for drafter, chunk, rounds in MANNERS:
        driver = Driver(_engine(loaded, prompts, len(CAST), chunk, rounds))
        for turn in ("cold", "again"):
            name = f"{turn}: {NAME} / {drafter} / chunk {chunk}, {rounds} rounds"
            requests = [
                _request(loaded, prompts[number], f"{turn}/{number}", number, drafter)
                for number in range(len(CAST))
            ]
            driver.run(requests)
            records = [driver.records[request.key] for request in requests]
            for number, (expected, got) in enumerate(zip(plain, records, strict=True)):
                # Cold, the cast shares beginnings, and who comes first is the scheduler's.
                whole = len(prompts[number]) // BLOCK_ROWS * BLOCK_ROWS
                verdict.add(
                    judge_trial(
                        f"{CAST[number][1]}, {name}",
                        expected,
                        got,
                        cached_tokens=whole if turn == "again" else got.cached_tokens,
                        logprobs=got.logprobs is not None,
                    )
                )
            verdict.require("drafts", sum(record.end.telemetry.drafted for record in records), 1, name)
        driver.clear()
    return verdict


def _store() -> Store:
    return Store(ModelSettings().folder())


@cache
def _loaded(folder: Path) -> LoadedModel:
    return load_model(folder, placement=chosen().placement())


def _prompts(folder: Path) -> list[tuple[int, ...]]:
    """The cast as the model's own template writes it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [
        tuple(
            tokenizer.encode(
                f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
                "<|im_start|>assistant\n",
                add_special_tokens=False,
            ).ids
        )
        for question, _ in CAST
    ]


def _alone(loaded: LoadedModel, prompts: list[tuple[int, ...]], number: int) -> Record:
    """One of the cast, cold, without drafts, one round a burst, in the smallest chunks."""
    driver = Driver(_engine(loaded, prompts, 1, BLOCK_ROWS, 1))
    request = _request(loaded, prompts[number], "plain", number, "none")
    driver.run([replace(request, use_cache=False, top_logprobs=TOP)])
    return driver.records[request.key]


def _request(
    loaded: LoadedModel, tokens: tuple[int, ...], name: str, number: int, drafter: str
) -> GenerateRequest:
    rule = RULES[CAST[number][1]]
    return GenerateRequest(
        request_id=name,
        root=ROOT,
        tokens=tokens,
        chain=chain(ROOT, tokens),
        sampling=rule.sampling,
        max_tokens=SAID,
        stop_ids=loaded.eos_ids,
        top_logprobs=TOP if rule.logprobs else None,
        **DRAFTERS[drafter].fields(),
    )


def _engine(
    loaded: LoadedModel, prompts: list[tuple[int, ...]], together: int, chunk: int, rounds: int
) -> WatchedEngine:
    rows = max(map(len, prompts)) + SAID
    config = pools(streams=together, rows=rows, chunk=chunk, snapshots=2 * len(CAST))
    return WatchedEngine(config, loaded, limits=drafting(rounds))
