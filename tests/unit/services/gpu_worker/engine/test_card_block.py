"""A block drafter in rounds that run whole, on triton's interpreter: the stream is plain decode's, and its drafts stand."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from services.gpu_worker.engine.batch import PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import FULL, EngineConfig
from services.gpu_worker.engine.flights import By, WholeRow
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.random import TINY, drawn_model
from services.gpu_worker.engine.models.random_block import block_hf_config, write_random_block
from services.gpu_worker.engine.placement import Placement
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.runner import ModelRunner

DIMS = replace(TINY, vocab=2, layer_types=(FULL,), has_mtp=False)
"""Two ids, so that a drafter of random weights guesses right now and then."""
CARD = Placement(device=torch.device("cpu"), dtype=torch.float32, on_card=True, fold_rows=2, recipe="card")
GREEDY = SamplingParams(seed=0, temperature=0.0)
PROMPT = [(number * 7919 + 13) % DIMS.vocab for number in range(20)]
TABLE, SAID, MOST = (3, 1), 9, 3


class Bench:
    """One sequence on slot 1, its prompt primed; the block drafter has taken it in."""

    def __init__(self) -> None:
        config = EngineConfig(
            num_blocks=4, num_slots=2, num_snapshots=0, max_verify=MOST, max_batch=1, max_context=128
        )
        model = drawn_model(DIMS, CARD).model
        fields = block_hf_config(
            DIMS, block_size=MOST, num_hidden_layers=1, layer_types=["sliding_attention"], dflash_config={}
        )
        with tempfile.TemporaryDirectory() as folder:
            drafter = load_block(write_random_block(Path(folder), fields, seed=3), model)
        self.block = BlockContext(drafter, model, num_slots=2, num_snapshots=0)
        self.states = StatePool(DIMS, 2, 0, MOST, CARD)
        self.runner = ModelRunner(model, KVPool(DIMS, 4, CARD), self.states, config, None, self.block)
        self.states.reset(1)
        chunk = PrefillChunk(
            slot=1, start=0, tokens=PROMPT, block_table=TABLE, previous_hidden=torch.zeros(DIMS.hidden)
        )
        (hidden,) = self.runner.prefill([chunk])
        self.first = int(self.runner.logits(hidden[-1:]).argmax())

    def plain(self) -> list[int]:
        stream = [self.first]
        while len(stream) < SAID:
            start = len(PROMPT) + len(stream) - 1
            rows = VerifyRows(slot=1, start=start, tokens=stream[-1:], block_table=TABLE)
            (hidden,) = self.runner.verify([rows])
            self.runner.accept(1, 1)
            stream.append(int(self.runner.logits(hidden).argmax()))
        return stream

    def drafted(self) -> tuple[list[int], list[int]]:
        """The stream, and how many drafts stood in each round."""
        stream, stood = [self.first], []
        while len(stream) < SAID:
            left = SAID - len(stream)
            row = WholeRow(
                slot=1,
                start=len(PROMPT) + len(stream) - 1,
                anchor=stream[-1],
                block_table=TABLE,
                rules=GREEDY,
                choice=0,
                k=min(MOST, left) - 1,
                by=By.BLOCK if left > 1 else By.HOST,
                tap=True,
                left=left,
            )
            (result,) = self.runner.whole([row], more=True)
            count = 0
            while count < len(result.drafts) and result.drafts[count] == result.picks[count]:
                count += 1
            stood.append(count)
            stream += result.picks[: count + 1]
            self.runner.accept(1, count + 1)
        self.runner.land()
        return stream, stood


def test_a_block_drafters_rounds_give_the_stream_of_plain_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    expected, bench = Bench().plain(), Bench()
    stream, stood = bench.drafted()
    assert stream == expected
    assert max(stood) > 0, "no draft was ever accepted: the test shows nothing"
    assert bench.block.passes >= len(stood) - 1
    assert bench.block.covers(1, len(PROMPT) + SAID - 1), "the books lack rows that the rounds committed"
