"""Cached drafting against a slow, separate reference; and the context rows that it stands on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.bench.block_reference import SlowBlock
from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.block_tensors import block_shapes
from services.gpu_worker.engine.models.checkpoint import Checkpoint
from services.gpu_worker.engine.models.random_block import write_random_block
from shared.errors import EngineFault
from tests.block_kit import VARIANTS, config_of, drafter_of
from tests.engine_kit import tiny_model
from tests.unit.services.gpu_worker.engine.models.oracle import relative

TARGET = tiny_model()
SLOTS, SNAPSHOTS = 3, 2


def _pair(variant: str) -> tuple[BlockContext, SlowBlock]:
    config = config_of(TARGET.dims, variant)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_block(Path(folder), config, seed=3)
        drafter = load_block(path, TARGET.model)
        weights, _ = Checkpoint(path).load(block_shapes(BlockDims.from_hf(config)))
    context = BlockContext(drafter, TARGET.model, num_slots=SLOTS, num_snapshots=SNAPSHOTS)
    context.ring.k.fill_(1e3)
    context.ring.v.fill_(-1e3)
    every = torch.arange(TARGET.dims.vocab)
    head = torch.eye(TARGET.dims.hidden)
    slow = SlowBlock(
        dims=drafter.dims,
        weights=weights,
        embedding=TARGET.model.embed(every),
        head=TARGET.model.logits(head).t().contiguous(),
    )
    return context, slow


def _taps(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2 * TARGET.dims.hidden, generator=generator)


def _feed(context: BlockContext, slot: int, taps: Tensor, chunk: int = 128, decode: int = 7) -> None:
    """All but `decode` rows by prefill, the rest by verifies of four columns of which two or three stand."""
    prompt = len(taps) - decode
    for first in range(0, prompt, chunk):
        context.primed(slot, first, taps[first : min(first + chunk, prompt)])
    position = prompt
    while position < len(taps):
        context.seen(
            slot, position, torch.cat([taps[position : position + 3], torch.full_like(taps[:1], torch.nan)])
        )
        stood = min(2 + position % 2, len(taps) - position)
        context.accepted(slot, stood)
        position += stood


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [20, 45, 46, 190, 1000])
def test_rows_are_the_slow_references(variant: str, rows: int) -> None:
    """The window is 40 and the block 5: contexts within, at and beyond the tail, and several times round the ring."""
    context, slow = _pair(variant)
    taps = _taps(rows)
    with torch.no_grad():
        _feed(context, 1, taps)
        context.settle([1])
        y = context._pass.run([BlockAsk(slot=1, start=rows, anchor=77, k=7)])[0]
    assert relative(y, slow.rows(taps, 77)) <= 1e-5


def test_a_padded_pass_is_the_pass() -> None:
    """What a graph of a card holds: sequences beyond those that ask stand at 0 and disturb nobody."""
    context, _ = _pair("dflash2")
    with torch.no_grad():
        for slot, length in enumerate((50, 120)):
            _feed(context, slot, _taps(length, slot))
        context.settle([0, 1])
        asks = [BlockAsk(slot=i, start=n, anchor=5, k=4) for i, n in enumerate((50, 120))]
        alone = context._pass.run(asks)
        context._pass._told[:, 2:] = 0
        padded = context._pass.launch((3, context.dims.block))
    assert torch.isfinite(padded).all()
    assert padded[:2].allclose(alone, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_drafts_are_the_slow_references(variant: str) -> None:
    context, slow = _pair(variant)
    taps = _taps(100)
    with torch.no_grad():
        _feed(context, 0, taps)
        (proposal,) = context.propose([BlockAsk(slot=0, start=100, anchor=9, k=16)])
    drafts, before = [], 9
    for k in range(proposal.count):
        before = int(proposal.row(k, before).argmax())
        drafts.append(before)
    assert len(drafts) == context.dims.drafts
    assert drafts == slow.drafts(taps, 9, 16)


def test_a_block_alone_and_in_company_proposes_the_same() -> None:
    context, _ = _pair("dflash2")
    lengths = (20, 100, 333)
    with torch.no_grad():
        for slot, length in enumerate(lengths):
            _feed(context, slot, _taps(length, slot))
        asks = [BlockAsk(slot=i, start=n, anchor=5 + i, k=4) for i, n in enumerate(lengths)]
        together = context.propose(asks)
        alone = [context.propose([ask])[0] for ask in asks]
    for one, other in zip(together, alone, strict=True):
        assert torch.tensor(one.row(2, 11)).allclose(torch.tensor(other.row(2, 11)), atol=1e-4)


def test_r_d2_a_restored_tail_drafts_as_a_cold_prime_would() -> None:
    """Exactly window + block rows, taken in a slot, restored in another: the bits of the rows are those of the prime."""
    context, _ = _pair("dflash2")
    taps = _taps(192)
    with torch.no_grad():
        context.primed(0, 0, taps[:128])
        context.take(0, 1, 128)
        context.primed(0, 128, taps[128:])
        context.restore(1, 2, 128)
        tail = context.ring.tail(2, 128)
        context.primed(2, 128, taps[128:])
        asks = [BlockAsk(slot=slot, start=192, anchor=9, k=4) for slot in (0, 2)]
        cold, warm = (context.propose([ask])[0] for ask in asks)
    assert torch.equal(tail, context.ring._tails[1])
    for k in range(4):
        assert (cold.row(k, 9) == warm.row(k, 9)).all()


def test_r_d3_the_tail_ends_at_the_captures_position() -> None:
    context, _ = _pair("dflash2")
    with torch.no_grad():
        context.primed(0, 0, _taps(128)[:64], defer=True)
        context.take(0, 1, 64)
        context.primed(0, 64, _taps(128)[64:], defer=True)
        assert not context.has_tail(1)
        assert context.complete(0, 1, 64)
        later = context.ring.end(0)
        context.settle([0])
    assert later == 64, "rows after the capture wait"
    assert context.ring.end(0) == 128
    fresh, _ = _pair("dflash2")
    with torch.no_grad():
        fresh.primed(0, 0, _taps(128)[:64])
    assert torch.equal(fresh.ring.tail(0, 64), context.ring._tails[1])


def test_r_d2_fewer_rows_are_refused_before_anything_is_drafted() -> None:
    context, _ = _pair("dflash2")
    rows = context.dims.tail_rows
    with torch.no_grad():
        context.ring.begin(0, 100)
        context.primed(0, 100, _taps(rows - 1))
        assert not context.covers(0, 100 + rows - 1)
        with pytest.raises(EngineFault, match="window"):
            context.propose([BlockAsk(slot=0, start=100 + rows - 1, anchor=9, k=4)])
        assert context.passes == 0
        context.primed(0, 100 + rows - 1, _taps(1))
        assert context.propose([BlockAsk(slot=0, start=100 + rows, anchor=9, k=4)])


def test_r_g4_a_snapshot_without_a_tail_is_no_snapshot_with_an_empty_one() -> None:
    context, _ = _pair("dflash2")
    context.ring.begin(0, 100)
    context.take(0, 0, 100)
    assert not context.has_tail(0)
    values = context.read(0)
    assert torch.isnan(values).all()
    context.take(1, 1, 0)
    assert context.has_tail(1), "at the start there is nothing to have"
    context.write(1, values)
    assert not context.has_tail(1)
    context.restore(1, 2, 100)
    assert not context.covers(2, 100)


def test_the_bytes_of_a_tail_are_the_formulas() -> None:
    """layers x (window + block) rows x KV heads x head x bytes x 2."""
    drafter = drafter_of(TARGET)
    context = BlockContext(drafter, TARGET.model, num_slots=2, num_snapshots=2)
    assert context.tail_bytes == 2 * (40 + 5) * 1 * 16 * 4 * 2
    assert context.tail_bytes == drafter.dims.tail_elements * 4
    assert context.read(0).numel() == context.tail_size


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_rows_are_conserved_whatever_comes(data: st.DataObject) -> None:
    """Against a list of the committed rows: what is in the ring are the newest rows, each the one of its position."""
    context, _ = _pair("dflash")
    every = _taps(700)
    committed, low = 0, 0
    with torch.no_grad():
        for _ in range(data.draw(st.integers(1, 12))):
            match data.draw(st.sampled_from(["verify", "prefill", "elsewhere", "settle", "around"])):
                case "verify":
                    width = data.draw(st.integers(1, 8))
                    stood = data.draw(st.integers(0, width))
                    context.seen(0, committed, every[committed : committed + width])
                    context.accepted(0, stood)
                    committed += stood
                case "prefill":
                    count = data.draw(st.integers(1, 128))
                    if committed + count > 600:
                        continue
                    context.primed(
                        0, committed, every[committed : committed + count], defer=data.draw(st.booleans())
                    )
                    committed += count
                case "elsewhere":
                    skipped = data.draw(st.integers(1, 9))
                    committed = low = committed + skipped
                case "settle":
                    context.settle([0])
                case _:
                    context.take(0, 0, context.ring.end(0))
                    context.restore(0, 1, context.ring.end(0))
        context.seen(0, committed, every[committed : committed + 1])
        context.accepted(0, 1)
        committed += 1
        covered = context.covers(0, committed)
        context.settle([0])
        assert context.waiting(0) == 0
        assert covered == (low <= max(0, committed - context.dims.tail_rows))
        assert context.ring.end(0) == committed
        first = max(context.ring.low(0), low)
        keys, values = context.drafter.context_rows(
            context.drafter.features(every[first:committed]), torch.arange(first, committed)
        )
        blocks, offsets = context.ring.places(0, first, committed)
        assert context.ring.k[:, blocks, :, offsets].allclose(keys, atol=1e-5)
        assert context.ring.v[:, blocks, :, offsets].allclose(values, atol=1e-5)
