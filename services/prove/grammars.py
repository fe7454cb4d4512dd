"""Streams that follow a grammar: a value of a JSON schema, calls of tools. Masks are made row by row from the stream's own
tokens, so drafts, company, a journal and a life set aside change nothing of it (C1, docs/adr/0016).

A trial is one engine and one way to draft. The cast runs in it together, a stream without a grammar among them: cold, from what
the cache kept, from a journal that ends in mid value, and set aside or handed to plain decode on the way. Each stream is
compared with the same request alone, cold and without a drafter, and that one with its grammar, walked anew from its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.grammar import Grammar
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest
from services.prove.axes import DRAFTERS
from services.prove.compare import Exam, Verdict, judge
from services.prove.drafts import PACES, Pace
from services.prove.driver import Driver, Record, WatchedEngine
from services.prove.models import EVERY, HAS, VOCAB, with_block
from services.prove.prompts import prompt
from services.prove.rules import RULES, TOP
from services.prove.script import Script
from services.prove.small import ALONE, drafting, pools
from services.prove.trial import Trial
from shared.config import POCKET
from shared.control import BEGIN_CALL, END_CALL
from shared.grammar import BREAK, call_rules, compile_grammar, json_value, read_tokens
from shared.protocol.chain import chain

ROOT: Final = b"\x55" * 32
"""Chain root of all that is asked here."""
SAID: Final = 64
"""Tokens of an answer, at most."""
MODELS: Final = ("tiny", "pocket", "window", "latent")
QUICK: Final = (("tiny", "mtp K=3"), ("tiny", "n-gram K=7"))
"""(model, drafter) of a short run."""
NO_SPACES: Final = {"whitespace_flexible": False}
"""Random weights would fill their budget with them."""
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "steps": {"type": "array", "items": {"enum": ["plan", "act", 7]}, "minItems": 1, "maxItems": 2},
        "done": {"type": "boolean"},
    },
    "required": ["title", "steps", "done"],
    "additionalProperties": False,
}
ARGUMENTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["km", "miles"]},
    },
    "required": ["value", "unit"],
    "additionalProperties": False,
}
CAST: Final = (
    ("value", "greedy, logprobs", "repeated text", 100),
    ("value", "sampled", "on the grid", 130),
    ("calls", "sampled, truncated", "tool call", 71),
    ("calls", "greedy, penalties", "unicode", 66),
    ("", "sampled", "short", 40),
)
"""(what is followed, rule, prompt, its tokens that are asked)."""


def family(everything: bool, seed: int) -> list[Trial]:
    """See `families.Family`. Nothing is drawn, so the seed says nothing."""
    if not everything:
        return [_trial(model, drafter, PACES[0]) for model, drafter in QUICK]
    ways = [
        (model, drafter)
        for model in MODELS
        for drafter, way in DRAFTERS.items()
        if way.k and way.kind in HAS[model]
    ]
    return [_trial(*way, PACES[place % len(PACES)]) for place, way in enumerate(ways)]


def _trial(model: str, drafter: str, pace: Pace) -> Trial:
    return Trial(name=f"{model} / {drafter} / {pace}", run=partial(tried, model, drafter, pace), shares=model)


# -- what is followed --------------------------------------------------------------------------------------------------


@cache
def tokens() -> LLTokenizer:
    """The vocabulary that all models share."""
    return read_tokens(POCKET, VOCAB)


@cache
def _id(text: str) -> int:
    found = Tokenizer.from_file(str(POCKET / "tokenizer.json")).token_to_id(text)
    assert found is not None, text
    return int(found)


@cache
def source(what: str) -> str:
    """The grammar, as a gateway writes it."""
    if what == "value":
        return f"start: {json_value(SCHEMA, spaces=NO_SPACES)}"
    marks = {mark: _id(mark) for mark in (BEGIN_CALL, END_CALL)}
    rules = call_rules(0, "convert", ARGUMENTS, marks, spaces=NO_SPACES)
    return "\n".join(["start: call0 (BREAK call0)*", BREAK, *rules, ""])


@cache
def grammar(what: str) -> Grammar:
    """Compiled once a process, as a worker keeps it."""
    return Grammar(compile_grammar(source(what), tokens()), tokens().eos_tokens)


def _walked(what: str, said: Record, name: str, verdict: Verdict) -> bool:
    """Hold a stream to its grammar, walked anew. Whether it came to an end there."""
    matcher = compile_grammar(source(what), tokens())
    taken = matcher.try_consume_tokens(list(said.tokens))
    verdict.require("tokens that the grammar takes", taken, len(said.tokens), name)
    ended = said.end.reason is FinishReason.STOP
    verdict.require("ends where the grammar is complete", int(matcher.is_accepting() or not ended), 1, name)
    return ended


# -- turns -------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Turn:
    """The cast once more, about to be asked."""

    plain: tuple[Record, ...]
    script: Script
    requests: list[GenerateRequest]

    def resume(self) -> None:
        """A journal holds a part of each, of other lengths."""
        for number, (request, record) in enumerate(zip(self.requests, self.plain, strict=True)):
            known = len(record.tokens) * (number + 1) // (len(CAST) + 1)
            self.requests[number] = replace(request, emitted=tuple(record.tokens[:known]))

    def disturb(self) -> None:
        """Each gives way in mid value, or goes on without its drafter."""
        for number, request in enumerate(self.requests):
            if number % 2:
                self.script.demote_after(request.key, 3)
            else:
                rows = len(request.tokens)
                self.script.give_way_at(request.key, [rows + 5, rows + 21])


TURNS: Final[dict[str, Callable[[Turn], None]]] = {
    "cold": lambda turn: None,
    "resumed": Turn.resume,
    "disturbed": Turn.disturb,
}


def tried(model: str, drafter: str, pace: Pace) -> Verdict:
    """Run the cast once for each turn in one engine and compare."""
    plain, script = reference(model), Script()
    name = f"{model} / {drafter} / {pace}"
    verdict = _walked_all(plain, name)
    loaded = with_block(model) if DRAFTERS[drafter].kind in ("block", "auto") else EVERY[model]()
    driver = Driver(_engine(loaded, len(CAST), pace, script=script))
    replayed = 0
    for kind, prepare in TURNS.items():
        requests = [_request(kind, number, drafter, scored=kind == "cold") for number in range(len(CAST))]
        turn = Turn(plain=plain, script=script, requests=requests)
        prepare(turn)
        driver.run(turn.requests)
        records = [driver.records[request.key] for request in turn.requests]
        for number, request in enumerate(turn.requests):
            trial = f"{kind}: {CAST[number][0] or 'free'}, {CAST[number][1]}, {name}"
            verdict.add(judge(_exam(trial, request, records[number]), plain[number], records[number]))
        told = [record.end.telemetry for record in records[:-1]]
        verdict.require("drafts under a grammar", sum(one.drafted for one in told), 1, f"{kind}: {name}")
        replayed += sum(one.replayed for one in told)
    verdict.require("journalled tokens under a grammar", replayed, len(CAST), name)
    verdict.require("streams set aside in mid value", driver.happened["Parked, preempted"], 1, name)
    driver.clear()
    return verdict


def _walked_all(plain: tuple[Record, ...], name: str) -> Verdict:
    """Hold the references to their grammars; some come to an end, or little would be shown."""
    verdict = Verdict()
    ended = [
        _walked(what, record, f"{what}: {name}", verdict)
        for (what, *_), record in zip(CAST, plain, strict=True)
        if what
    ]
    verdict.require("streams that came to the end of their grammar", sum(ended), 1, name)
    return verdict


def _exam(trial: str, request: GenerateRequest, got: Record) -> Exam:
    return Exam(
        cell=trial,
        request_id=trial,
        prompt_tokens=len(request.tokens),
        known=len(request.emitted),
        logprobs=request.top_logprobs is not None,
        cached_tokens=got.cached_tokens,
        gap=lambda index, want, have: None,
    )


@cache
def reference(model: str) -> tuple[Record, ...]:
    """Every request of the cast alone, cold, without a drafter, in the smallest chunks. Made once a process."""
    records = []
    for number in range(len(CAST)):
        driver = Driver(_engine(EVERY[model](), 1, PACES[-1], limits=ALONE))
        request = replace(_request("plain", number, "none"), use_cache=False, top_logprobs=TOP)
        driver.run([request])
        records.append(driver.records[request.key])
    return tuple(records)


def _request(name: str, number: int, drafter: str, *, scored: bool = False) -> GenerateRequest:
    """`scored`: with log probabilities, if the rule has them."""
    what, rule, asked, length = CAST[number]
    ids = prompt(asked)[:length]
    return GenerateRequest(
        request_id=f"{name}/{number}",
        root=ROOT,
        tokens=ids,
        chain=chain(ROOT, ids),
        sampling=RULES[rule].sampling,
        grammar=grammar(what) if what else None,
        max_tokens=SAID,
        stop_ids=frozenset({_id("<|im_end|>")}),
        top_logprobs=TOP if scored and RULES[rule].logprobs else None,
        **DRAFTERS[drafter].fields(),
    )


def _engine(
    loaded: LoadedModel,
    together: int,
    pace: Pace,
    *,
    limits: EngineLimits | None = None,
    script: Script | None = None,
) -> WatchedEngine:
    rows = max(length for *_, length in CAST) + SAID
    config = pools(streams=together, rows=rows, chunk=pace.chunk, snapshots=2 * len(CAST))
    return WatchedEngine(config, loaded, limits=limits or drafting(pace.rounds), faults=script)
