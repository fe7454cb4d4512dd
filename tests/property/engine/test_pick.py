"""The pick that runs where the logits are decides what the host's picker decides, for every stream that it may take."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import PickPlan, device_pickable, reference
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.sampling import TokenPicker

VOCAB = 97

rules = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 20, 64, 96, 97, 200]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
).filter(device_pickable)


@given(
    streams=st.lists(st.tuples(rules, st.integers(0, 3), st.integers(0, 10_000)), min_size=1, max_size=4),
    columns=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_the_pick_is_the_pickers(
    streams: list[tuple[SamplingParams, int, int]], columns: int, seed: int, step: float
) -> None:
    """`step` > 0 rounds the logits, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(streams) * columns, VOCAB, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    plan = PickPlan.empty(len(streams), columns)
    plan.fill([each for each, _, _ in streams], [choice for _, choice, _ in streams], vocab=VOCAB)
    plan.starts.copy_(torch.tensor([start for _, _, start in streams]))
    told = reference.pick(logits, plan).ids.view(len(streams), columns)
    for number, (params, choice, start) in enumerate(streams):
        picker = TokenPicker(params, vocab=VOCAB, prompt=[0] * (start + 1), choice=choice)
        for column in range(columns):
            row = logits[number * columns + column].numpy()
            assert told[number, column] == picker.pick(row, start + column + 1)
