"""C1 on the whole trunk: one stream of bits, however its rows are launched."""

from __future__ import annotations

import threading

import pytest
import torch

from kernels.testing import CO_TENANTS, COLUMNS, CUTS, assert_equal_bits, threads
from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.random import TINY
from shared.errors import EngineFault
from tests.unit.services.gpu_worker.engine.rig import ODD, POCKET_SHAPE, Line, Rig, loaded, table_of, tokens

PROMPT, STEPS = 250, 24
DIMS = pytest.mark.parametrize("dims", [TINY, ODD], ids=["tiny", "odd"])


def _decoded(dims: ModelDims) -> tuple[torch.Tensor, torch.Tensor, bytes]:
    """The reference stream: prefill, then one column at a time, alone, slot 0."""
    line = Rig(loaded(dims)).start(0, table_of(0))
    line.prefill(tokens(PROMPT))
    hidden = line.decode(tokens(STEPS, seed=1))
    return hidden, line.kv(trunk_only=True), line.digest()


def _neighbours(rig: Rig, count: int) -> list[Line]:
    """Other sequences of all lengths, primed."""
    lines = []
    for i in range(count):
        line = rig.start(1 + i, table_of(1 + i))
        line.prefill(tokens(1 + 61 * i, seed=50 + i))
        lines.append(line)
    return lines


@DIMS
@pytest.mark.parametrize("co_tenants", CO_TENANTS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_verify_equals_decode(columns: int, co_tenants: int, dims: ModelDims) -> None:
    """Hidden, KV, recurrent and conv states; ragged neighbours that reject; another slot, other blocks, two threads."""
    hidden, kv, digest = _decoded(dims)
    stream = tokens(STEPS, seed=1)
    with threads(1 + columns % 2):
        rig = Rig(loaded(dims))
        others = _neighbours(rig, co_tenants)
        line = rig.start(8, list(reversed(table_of(8))))
        line.prefill(tokens(PROMPT))
        for first in range(0, STEPS, columns):
            rows = [other.rows(tokens(1 + (first + i) % 8, seed=first + i)) for i, other in enumerate(others)]
            rows.insert(co_tenants // 2, line.rows(stream[first : first + columns]))
            out = rig.runner.verify(rows)
            assert_equal_bits(out[co_tenants // 2], hidden[first : first + columns], f"hidden from {first}")
            line.accept(min(columns, STEPS - first))
            for i, other in enumerate(others):
                other.accept((first + i) % (1 + (first + i) % 8 + 1))
        assert_equal_bits(line.kv(trunk_only=True), kv, "KV")
        assert line.digest() == digest


@DIMS
def test_rollback_equals_decode(dims: ModelDims) -> None:
    """Verify 8, accept few or none, verify again: as if the rejected drafts had never been."""
    hidden, kv, digest = _decoded(dims)
    stream, line = tokens(STEPS, seed=1), Rig(loaded(dims)).start(3, table_of(3))
    line.prefill(tokens(PROMPT))
    first = 0
    for right in (3, 1, 0, 8, 5, 2, 4, 1):
        wrong = tokens(8 - right, seed=99 + first)
        out = line.verify([*stream[first : first + right], *wrong], accept=right)
        assert_equal_bits(out[:right], hidden[first : first + right], f"{right} right rows from {first}")
        first += right
    assert first == STEPS
    assert_equal_bits(line.kv(trunk_only=True), kv, "KV")
    assert line.digest() == digest


def test_the_pocket_shape_is_exact_across_threads_and_cuts() -> None:
    """The widths that ship: 300 rows primed in two ways, then four columns beside others, under two threads."""
    stream = tokens(8, seed=1)
    alone = Rig(loaded(POCKET_SHAPE)).start(0, table_of(0))
    primed = alone.prefill(tokens(300))
    hidden = alone.decode(stream)
    with threads(2):
        rig = Rig(loaded(POCKET_SHAPE))
        others = _neighbours(rig, 3)
        line = rig.start(8, table_of(8))
        assert_equal_bits(line.prefill(tokens(300), (64, 192, 44)), primed, "prefill")
        for first in (0, 4):
            out = rig.runner.verify(
                [*(other.rows([1, 2, 3]) for other in others), line.rows(stream[first : first + 4])]
            )
            assert_equal_bits(out[-1], hidden[first : first + 4], f"hidden from {first}")
            line.accept(4)
            for other in others:
                other.accept(1)
    assert line.digest() == alone.digest()
    assert_equal_bits(line.kv(trunk_only=True), alone.kv(trunk_only=True), "KV")


@pytest.mark.parametrize("at", [1, 63, 64, 65, 127, 128, 129])
def test_verify_across_block_edges_equals_decode(at: int) -> None:
    stream = tokens(16, seed=5)
    alone = Rig(loaded()).start(0, table_of(0))
    alone.prefill(tokens(at))
    hidden = alone.decode(stream)
    together = Rig(loaded()).start(2, table_of(2))
    together.prefill(tokens(at))
    assert_equal_bits(
        torch.cat([together.verify(stream[:8]), together.verify(stream[8:])]), hidden, f"from {at}"
    )


def test_more_columns_than_a_query_tile() -> None:
    stream = tokens(20, seed=6)
    alone = Rig(loaded()).start(0, table_of(0))
    alone.prefill(tokens(100))
    rig = Rig(loaded(), max_verify=20)
    wide, narrow = rig.start(1, table_of(1)), rig.start(2, table_of(2))
    wide.prefill(tokens(100))
    narrow.prefill(tokens(7))
    out = rig.runner.verify([narrow.rows([4, 5]), wide.rows(stream)])
    assert_equal_bits(out[1], alone.decode(stream), "20 columns")


@DIMS
@pytest.mark.parametrize("thread_count", [1, 2])
def test_prefill_of_any_grid_cut_is_one_prefill(thread_count: int, dims: ModelDims) -> None:
    """Hidden, KV, draft plane and states of 500 rows, and of 512 rows whose first 500 are the same."""
    ids = tokens(512)
    whole = Rig(loaded(dims)).start(0, table_of(0))
    hidden = whole.prefill(ids[:500])
    kv, digest = whole.kv(), whole.digest()
    with threads(thread_count):
        for cuts in CUTS:
            line = Rig(loaded(dims)).start(5, table_of(5))
            assert_equal_bits(line.prefill(ids[:500], cuts), hidden, f"hidden of {cuts}")
            assert_equal_bits(line.kv(), kv, f"KV of {cuts}")
            assert line.digest() == digest, cuts
        longer = Rig(loaded(dims)).start(1, table_of(1))
        assert_equal_bits(longer.prefill(ids)[:500], hidden, "hidden of a longer prompt")
        assert_equal_bits(longer.kv(500), kv, "KV of a longer prompt")


def test_prefill_from_a_restored_snapshot_is_one_prefill() -> None:
    """Snapshot at 320, the original goes on and is spoilt, a copy goes on from the snapshot in another slot."""
    ids, rig = tokens(500), Rig(loaded())
    whole = rig.start(0, table_of(0))
    hidden = whole.prefill(ids)
    first = rig.start(1, table_of(1))
    first.prefill(ids[:320])
    rig.states.take_snapshot(1, 2)
    first.verify(tokens(8, seed=3), accept=5)
    rig.states.reset(4)
    rig.states.restore(2, 4)
    clone = Line(rig, 4, table_of(4), length=320)
    clone.last_hidden = hidden[319]
    rig.kv.write_rows(clone.table, 0, rig.kv.read_rows(first.table, 0, 320))
    assert_equal_bits(clone.prefill(ids[320:], (64, 116)), hidden[320:], "hidden after the snapshot")
    assert_equal_bits(clone.kv(), whole.kv(), "KV after the snapshot")
    assert clone.digest() == whole.digest()


def test_flush_changes_no_later_bit() -> None:
    stream = tokens(12, seed=8)
    flushed, folded = Rig(loaded()).start(0, table_of(0)), Rig(loaded()).start(0, table_of(0))
    for line in (flushed, folded):
        line.prefill(tokens(70))
    for first, accept in ((0, 2), (2, 3), (5, 1), (6, 6)):
        columns = stream[first : first + 6]
        one, other = flushed.verify(columns, accept), folded.verify(columns, accept)
        flushed.rig.runner.flush(0)
        flushed.rig.runner.flush(0)
        assert_equal_bits(one, other, f"rows from {first}")
    assert flushed.digest() == folded.digest()


def test_logits_of_a_row_do_not_depend_on_the_others() -> None:
    rig = Rig(loaded())
    hidden = torch.randn(9, TINY.hidden, generator=torch.Generator().manual_seed(0))
    together = rig.runner.logits(hidden)
    for row in range(9):
        assert_equal_bits(rig.runner.logits(hidden[row : row + 1])[0], together[row], f"row {row}")


def test_draft_rows_keep_their_bits() -> None:
    """Rows given together, one by one or beside another sequence: same y, same draft plane."""
    ids, hiddens = tokens(6, seed=2), torch.randn(6, TINY.hidden, generator=torch.Generator().manual_seed(1))
    together, single = (Rig(loaded()).start(0, table_of(0)) for _ in range(2))
    for line in (together, single):
        line.prefill(tokens(60))
    expected = together.draft(60, ids, hiddens)
    for i in range(6):
        assert_equal_bits(single.draft(60 + i, [ids[i]], hiddens[i : i + 1])[0], expected[i], f"row {i}")
    assert_equal_bits(single.kv(66)[:, -1], together.kv(66)[:, -1], "draft plane")
    rig = Rig(loaded())
    line, other = rig.start(2, table_of(2)), rig.start(3, table_of(3))
    line.prefill(tokens(60))
    other.prefill(tokens(9, seed=4))
    rows = [
        DraftRows(start=9, tokens=[7], hiddens=hiddens[:1], block_table=other.table),
        DraftRows(start=60, tokens=ids, hiddens=hiddens, block_table=line.table),
    ]
    assert_equal_bits(rig.runner.draft(rows)[1], expected, "beside another sequence")


def test_prefilled_draft_rows_are_the_pairs_of_token_and_previous_hidden() -> None:
    """Prefill writes draft row p from (x_p, h_{p-1}); decode-phase rows of the same pairs agree to rounding."""
    ids = tokens(100)
    line = Rig(loaded()).start(0, table_of(0))
    hidden = line.prefill(ids, (64, 36))
    primed = line.kv()[:, -1].clone()
    before = torch.cat([torch.zeros(1, TINY.hidden), hidden[:-1]])
    line.draft(0, ids, before)
    torch.testing.assert_close(line.kv()[:, -1], primed, rtol=1e-5, atol=1e-5)


def test_a_broken_sequence_does_not_reach_its_neighbour() -> None:
    """NaN states of one slot, NaN rows in a block that another sequence reuses: the other keeps its bits."""
    hidden, _, _ = _decoded(TINY)
    rig = Rig(loaded())
    bad, line = rig.start(1, table_of(1)), rig.start(0, table_of(0))
    line.prefill(tokens(PROMPT))
    bad.prefill(tokens(30))
    rig.states.state[:, 1] = torch.nan
    out = rig.runner.verify([bad.rows([1, 2]), line.rows(tokens(STEPS, seed=1)[:3])])
    assert out[0].isnan().all()
    assert_equal_bits(out[1], hidden[:3], "beside a broken sequence")


def _misuse(line: Line) -> list[tuple[str, object]]:
    runner, table = line.rig.runner, line.table
    zeros = torch.zeros(TINY.hidden)

    def chunk(start: int, ids: list[int], blocks: list[int]) -> object:
        return lambda: runner.prefill(
            [PrefillChunk(slot=0, start=start, tokens=ids, block_table=blocks, previous_hidden=zeros)]
        )

    def verify(start: int, ids: list[int], blocks: list[int]) -> object:
        return lambda: runner.verify([VerifyRows(slot=0, start=start, tokens=ids, block_table=blocks)])

    return [
        ("not on the grid", chunk(70, [1], table)),
        ("valid at 70", chunk(128, [1], table)),
        ("valid at 70", verify(71, [1], table)),
        ("possible in one call", verify(70, [1] * 9, table)),
        ("possible in one call", verify(70, [], table)),
        ("block table holds 1", verify(70, [1], table[:1])),
        ("outside the vocabulary", verify(70, [TINY.vocab], table)),
        ("outside the vocabulary", verify(70, [-1], table)),
        ("outside the context", verify(4096, [1], table)),
        ("slots must differ", lambda: runner.verify([line.rows([1]), line.rows([1])])),
        ("nothing to accept", lambda: runner.accept(0, 1)),
        ("hiddens", lambda: line.draft(70, [1, 2], torch.zeros(1, TINY.hidden))),
    ]


@pytest.mark.parametrize("case", range(12))
def test_misuse_is_refused_before_anything_is_written(case: int) -> None:
    line = Rig(loaded()).start(0, table_of(0))
    line.prefill(tokens(70))
    digest, kv = line.digest(), line.rig.kv.k.clone()
    message, call = _misuse(line)[case]
    with pytest.raises(EngineFault, match=message):
        call()  # type: ignore[operator]
    assert line.digest() == digest
    assert torch.equal(line.rig.kv.k.nan_to_num(7.0), kv.nan_to_num(7.0))


def test_a_verify_must_be_accepted_before_the_next() -> None:
    line = Rig(loaded()).start(0, table_of(0))
    line.prefill(tokens(10))
    line.rig.runner.verify([line.rows([1, 2])])
    for call in (
        lambda: line.rig.runner.verify([line.rows([1])]),
        lambda: line.rig.runner.flush(0),
        lambda: line.rig.runner.accept(0, 3),
        lambda: line.rig.states.take_snapshot(0, 0),
    ):
        with pytest.raises(EngineFault):
            call()
    line.accept(1)
    line.verify([3])


def test_the_configured_threads_hold_in_the_thread_that_runs() -> None:
    """The engine thread is not the one that loaded the model; what OpenMP knows belongs to a thread."""
    with threads(2):
        rig = Rig(loaded())
    seen: list[int] = []

    def run() -> None:
        torch.set_num_threads(1)
        rig.start(0, table_of(0)).prefill(tokens(5))
        seen.append(torch.get_num_threads())

    with threads(1):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(timeout=60)
    assert seen == [2]


def test_without_an_mtp_head_there_is_no_draft_plane() -> None:
    model = loaded(with_mtp=False)
    line = Rig(model).start(0, table_of(0))
    with_head = Rig(loaded()).start(0, table_of(0))
    assert model.dims.planes == TINY.planes - 1
    line.prefill(tokens(70))
    with_head.prefill(tokens(70))
    assert line.kv().shape == with_head.kv(trunk_only=True).shape
    with pytest.raises(EngineFault, match="no MTP head"):
        line.draft(0, [1], torch.zeros(1, TINY.hidden))
