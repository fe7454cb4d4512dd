"""A checkpoint that nobody here trained: what the engine computes of it is what transformers computes."""

from __future__ import annotations

import pytest
import torch

from services.gateway.model import load_model as load_served
from services.gpu_worker.engine.models.loader import load_model
from tests.public import NAME, public_models
from tests.unit.services.gpu_worker.engine.models.oracle import relative
from tests.unit.services.gpu_worker.engine.rig import Rig, table_of

TEXT = "<|im_start|>user\nTell me about the history of bread in ten sentences.<|im_end|>\n<|im_start|>assistant\n"
SAID = 16


@torch.no_grad()
def test_logits_and_greedy_ids_are_those_of_transformers() -> None:
    """The prompt's logits within 1e-5, then greedy ids, by verifies of one column and each within 1e-5."""
    transformers = pytest.importorskip("transformers")
    folder = public_models() / NAME
    vocabulary = load_served(NAME, folder).vocabulary
    prompt = vocabulary.encode(vocabulary.control.split(TEXT))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    line = Rig(load_model(folder)).start(2, table_of(2, 2))
    rows = line.rig.runner.logits(line.prefill(prompt, (len(prompt),)))
    assert relative(rows, oracle(torch.tensor([prompt])).logits[0]) <= 1e-5
    ids, decoded = [int(rows[-1].argmax())], []
    for _ in range(SAID - 1):
        decoded.append(line.rig.runner.logits(line.verify(ids[-1:]))[0])
        ids.append(int(decoded[-1].argmax()))
    theirs = oracle(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    assert theirs.argmax(-1).tolist() == ids, "each is what the oracle picks after those before it"
    assert relative(torch.stack(decoded), theirs[1:]) <= 1e-5
