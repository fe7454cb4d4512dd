"""A card played on the CPU: rounds run whole, fly ahead and are landed as on a card, in the twins' arithmetic.

What a launch does, it does at once, as a stream of the device does it in the order of launches: the positions, the pending rows
and the accepted drafts are those that the launch before left behind (`kernels.advance`), whatever the host has read by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kernels import sampling
from kernels.gated_delta import ReplayPlan
from services.gpu_worker.engine import whole
from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.cache.pages import IdPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.device_rounds import DeviceRounds
from services.gpu_worker.engine.flights import By, Flight, Round, WholeResult, WholeRow
from services.gpu_worker.engine.layers.local import local_decode
from services.gpu_worker.engine.layers.steps import DecodeStep, Span, decode_attention
from services.gpu_worker.engine.runner import ModelRunner
from services.gpu_worker.engine.whole import WholeRounds


class PlayedRounds(DeviceRounds):
    """Launches of the twins over what the inputs say."""

    def _trunk(self, size: Round) -> Tensor:
        wide, inputs, states = size.columns, self.inputs, self._states
        hidden = torch.zeros(size.sequences, wide, self._model.dims.hidden)
        live = self._live(size)
        if live:
            spans = [self._span(number, int(inputs.starts[number]), self._columns(number)) for number in live]
            slots = inputs.slots[live].tolist()
            attention = decode_attention(spans, self._kv, self._model.rope)
            columns = attention.columns
            plan = ReplayPlan.build(
                slots,
                inputs.pending[live].tolist(),
                columns,
                states.max_verify,
                states.num_slots,
                states.taps,
            )
            local = local_decode(spans, slots, cast("Any", self._ring), self._model.local_rope)
            ids = inputs.ids[: size.sequences * wide].view(-1, wide)[live, :columns].long()
            rows = self._model.trunk(
                self._model.embed(ids.flatten()), DecodeStep(attention, states, plan, local)
            )
            hidden[live, :columns] = rows.view(len(live), columns, -1)
        return hidden.flatten(0, 1)

    def launch(self, size: Round) -> Tensor:
        if size.head:
            self._draft(size)
        return self.verify(size)

    def _draft(self, size: Round) -> None:
        """A chain a sequence, one after the other."""
        ids = self.inputs.ids[: size.sequences * size.columns].view(size.sequences, size.columns)
        own = [number for number in self._live(size) if self.told.by[number] == By.HEAD]
        hidden = torch.zeros(size.sequences, self._model.dims.hidden)
        for depth in range(1, size.head + 1):
            for number in own:
                at = int(self.inputs.starts[number]) + depth - 1
                if depth == 1:
                    count = int(self.state.tail_counts[number])
                    tokens = self.state.tail_tokens[number, :count]
                    before, first = self.state.tail_hidden[number, :count], at - count + 1
                else:
                    tokens, before, first = ids[number, depth - 1 : depth], hidden[number : number + 1], at
                if depth < self._columns(number):
                    hidden[number] = self._head_rows(number, first, tokens, before)[-1]
            plan = self.rules.of(self.inputs.starts[: size.sequences] + (depth - 1), 1)
            picked = sampling.pick(self._model.draft_logits(hidden), plan).ids
            ids[own, depth] = picked[own].clamp_min(0)

    def _head_rows(self, number: int, first: int, tokens: Tensor, before: Tensor) -> Tensor:
        assert self._model.mtp is not None
        step = decode_attention([self._span(number, first, len(tokens))], self._kv, self._model.rope)
        return self._model.mtp(self._model.embed(tokens.long()), before, step)

    def _live(self, size: Round) -> list[int]:
        return [number for number in range(size.sequences) if self._columns(number)]

    def _columns(self, number: int) -> int:
        return int(self.inputs.counts[number])

    def _span(self, number: int, start: int, count: int) -> Span:
        return Span(start, count, self.inputs.tables[number].tolist())


@dataclass
class Flights:
    """What became of rounds, counted: `asked` ones were launched when they were asked for, `used` ones flew already, and
    `landed` ones flew for nobody."""

    asked: int = 0
    used: int = 0
    landed: int = 0
    rounds: WholeRounds | None = None

    @property
    def flying(self) -> frozenset[int]:
        """Slots of what is on its way now."""
        flight = self._flight
        return flight.slots if flight is not None else frozenset()

    @property
    def size(self) -> Round | None:
        """Of what is on its way now."""
        flight = self._flight
        return flight.size if flight is not None else None

    @property
    def _flight(self) -> Flight | None:
        return self.rounds._flight if self.rounds is not None else None


def play_card(patch: pytest.MonkeyPatch) -> Flights:
    """Engines that are built while `patch` holds run their rounds whole, on a card that the CPU plays. One at a time: nothing
    but a round may be done with a slot of what is on its way, nor may it be given away."""
    counts = Flights()

    class Counted(WholeRounds):
        def run(self, rows: Sequence[WholeRow], *, more: bool = False) -> list[WholeResult]:
            counts.rounds = self
            return super().run(rows, more=more)

        def _launch(self, rows: Sequence[WholeRow]) -> tuple[Flight, list[WholeRow]]:
            counts.asked += 1
            return super()._launch(rows)

        def _arrived(self, rows: Sequence[WholeRow]) -> Flight | None:
            arrived = super()._arrived(rows)
            counts.used += arrived is not None
            return arrived

        def land(self, but: Any = ()) -> None:
            before = self._flight
            super().land(but)
            counts.landed += before is not None and self._flight is None and bool(before.slots)

    def rounds(runner: ModelRunner) -> WholeRounds:
        draft: Callable[[DraftRows], object] = lambda row: runner.draft([row])  # noqa: E731 - a name for its type
        blocks = -(-min(runner._config.max_context, runner.dims.max_positions) // 64)
        return Counted(
            runner._model, runner._kv, runner._states, runner._config, blocks, draft, ring=runner._ring
        )

    def guarded(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def asked(pool: Any, *given: int) -> Any:
            slot = given[-1] if name == "restore" else given[0]
            if not isinstance(pool, IdPool) or pool._name == "slot":
                assert slot not in counts.flying, f"{name} of slot {slot}, which has a round on its way"
            return plain(pool, *given)

        patch.setattr(owner, name, asked)

    guarded(IdPool, "release")
    for name in ("reset", "restore", "take_snapshot", "advanced", "flushed", "digest"):
        guarded(StatePool, name)
    patch.setattr(whole, "DeviceRounds", PlayedRounds)
    patch.setattr(ModelRunner, "_whole_rounds", rounds)
    return counts
