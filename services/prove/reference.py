"""The stream that every cell of a request must give: the request alone, cold, without a drafter, one round a burst.

Made once a (model, prompt, rule, budget), each in a fresh engine with the smallest chunk. Log probabilities are always
asked for, which also shows that asking for them changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.requests import GenerateRequest
from services.prove.axes import BUDGETS, Cell
from services.prove.driver import Driver, Record, WatchedEngine
from services.prove.models import MODELS
from services.prove.prompts import prompt
from services.prove.rules import RULES, TOP
from services.prove.small import ALONE
from shared.protocol.chain import chain

ROOT: Final = bytes(32)
Origin = tuple[str, str, str, str]


def origin(cell: Cell) -> Origin:
    """What a stream depends on; everything else of a cell must not matter."""
    return cell.model, cell.prompt, cell.rule, cell.budget


def plain_request(cell: Cell) -> GenerateRequest:
    """The cell's request without anything that must not matter."""
    rule, tokens = RULES[cell.rule], prompt(cell.prompt)
    return GenerateRequest(
        request_id="reference",
        root=ROOT,
        tokens=tokens,
        chain=chain(ROOT, tokens),
        sampling=rule.sampling,
        max_tokens=BUDGETS[cell.budget],
        stop_ids=rule.stop_ids,
        use_cache=False,
        top_logprobs=TOP,
    )


class References:
    """Reference streams, made when they are first asked for."""

    def __init__(self) -> None:
        self._records: dict[Origin, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def of(self, cell: Cell) -> Record:
        """The stream that the cell must give."""
        key = origin(cell)
        if key not in self._records:
            self._records[key] = _alone(cell, plain_request(cell))
        return self._records[key]

    def gap(self, cell: Cell, index: int, expected: int, got: int) -> float | None:
        """By how much the target's raw logit of `expected` exceeds that of `got` at a completion index.

        Runs the reference once more with all log probabilities. Null where the stream ends there with a stop id, which
        no burst carries.
        """
        request = replace(
            plain_request(cell),
            max_tokens=index + 1,
            top_logprobs=MODELS[cell.model]().dims.vocab,
        )
        logprobs = _alone(cell, request).logprobs or []
        if len(logprobs) <= index:
            return None
        row = dict(logprobs[index].top)
        return row[expected] - row[got]


def _alone(cell: Cell, request: GenerateRequest) -> Record:
    rows = len(request.tokens) + request.max_tokens
    config = EngineConfig(
        num_blocks=-(-rows // BLOCK_ROWS),
        num_slots=1,
        num_snapshots=0,
        max_batch=1,
        prefill_chunk=BLOCK_ROWS,
        max_context=rows,
    )
    engine = WatchedEngine(config, MODELS[cell.model](), limits=ALONE)
    driver = Driver(engine)
    driver.run([request])
    return driver.records[request.key]
