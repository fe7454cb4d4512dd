"""Rounds that run whole of families without recurrent states, on triton's interpreter: the stream is plain decode's."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import FULL, SLIDING, EngineConfig
from services.gpu_worker.engine.flights import By, WholeRow
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.placement import Placement
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.runner import ModelRunner

CARD = Placement(device=torch.device("cpu"), dtype=torch.float32, on_card=True, fold_rows=1, recipe="card")
GREEDY = SamplingParams(seed=0, temperature=0.0)
VOCAB, MOST, SAID = 4, 3, 5
TABLE, PROMPT = (3, 1), [(number * 7919 + 13) % VOCAB for number in range(30)]


def _sliding(folder: Path) -> Path:
    """A window that the prompt fills."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 20,
    }
    return write_random_dense(folder, dense_hf_config("gemma3_text", **fields), seed=2)


def _latent(folder: Path) -> Path:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "kv_lora_rank": 24,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "mlp_layer_types": ["dense"],
    }
    return write_random_latent(folder, latent_hf_config(**fields), seed=2)


class Bench:
    """One sequence on slot 1, its prompt primed."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = EngineConfig(
            num_blocks=4, num_slots=2, num_snapshots=0, max_verify=MOST, max_batch=1, max_context=128
        )
        model = loaded.model
        kv, states = KVPool(model.dims, 4, CARD), StatePool(model.dims, 2, 0, MOST, CARD)
        ring = RingPool(model.dims, 2, 0, prefill_rows=64, max_verify=MOST)
        self.runner = ModelRunner(model, kv, states, config, ring)
        states.reset(1)
        ring.reset(1)
        nothing = torch.zeros(model.dims.hidden)
        chunk = PrefillChunk(slot=1, start=0, tokens=PROMPT, block_table=TABLE, previous_hidden=nothing)
        (hidden,) = self.runner.prefill([chunk])
        self.hidden, self.first = hidden[-1:], int(self.runner.logits(hidden[-1:]).argmax())

    def plain(self) -> list[int]:
        stream = [self.first]
        while len(stream) < SAID:
            start = len(PROMPT) + len(stream) - 1
            rows = VerifyRows(slot=1, start=start, tokens=stream[-1:], block_table=TABLE)
            (hidden,) = self.runner.verify([rows])
            self.runner.accept(1, 1)
            stream.append(int(self.runner.logits(hidden).argmax()))
        return stream

    def whole(self, by: By) -> list[int]:
        stream, behind, hiddens = [self.first], [self.first], self.hidden
        while len(stream) < SAID:
            row = self._row(stream, by, behind, hiddens)
            (result,) = self.runner.whole([row], more=True)
            count = 0
            while count < len(result.drafts) and result.drafts[count] == result.picks[count]:
                count += 1
            behind, hiddens = result.picks[: count + 1], result.hidden[: count + 1]
            stream += behind
            self.runner.accept(1, count + 1)
        self.runner.land()
        return stream

    def _row(self, stream: list[int], by: By, behind: list[int], hiddens: Tensor) -> WholeRow:
        start, left = len(PROMPT) + len(stream) - 1, SAID - len(stream)
        k = min(MOST, left) - 1 if by is By.HEAD else 0
        catch_up = DraftRows(start=start + 1 - len(behind), tokens=behind, hiddens=hiddens, block_table=TABLE)
        return WholeRow(
            slot=1,
            start=start,
            anchor=stream[-1],
            block_table=TABLE,
            rules=GREEDY,
            choice=0,
            k=k,
            by=by if k else By.HOST,
            catch_up=catch_up if k else None,
            left=left,
        )


@pytest.mark.parametrize(
    ("write", "by"), [(_sliding, By.HOST), (_latent, By.HEAD)], ids=["sliding", "latent"]
)
def test_rounds_that_run_whole_give_the_stream_of_plain_decode(
    write: Callable[[Path], Path], by: By, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    loaded = load_model(write(tmp_path), placement=CARD)
    expected = Bench(loaded).plain()
    assert Bench(loaded).whole(by) == expected
