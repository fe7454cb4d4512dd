"""A made-up GGUF file with SmolLM2's layout becomes a folder that transformers, the gateway and the engine read alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from services.gateway.model import load_model as load_served
from services.gpu_worker.engine.models.loader import load_model
from services.models.catalogue import KNOWN
from services.models.faults import ModelFault
from services.models.folder import convert
from tests.unit.services.gpu_worker.engine.models.oracle import assert_the_oracles_logits_and_ids
from tests.unit.services.gpu_worker.engine.rig import Rig, table_of, tokens
from tests.unit.services.models.made_up import CONTEXT, GgufWriter, f32, llama, vocabulary

SMOLLM2 = KNOWN["smollm2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    convert(llama()[0].write(tmp_path / "a.gguf"), SMOLLM2, made)
    return made


def test_weights_are_the_files_rounded_to_bfloat16(folder: Path) -> None:
    expected, found = llama()[1], load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], torch.from_numpy(values).to(torch.bfloat16)), name


def test_progress_ends_at_all(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(
        llama()[0].write(tmp_path / "a.gguf"), SMOLLM2, tmp_path, progress=lambda *told: seen.append(told)
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1]


@torch.no_grad()
def test_the_engine_computes_what_transformers_computes(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    line = Rig(load_model(folder)).start(2, table_of(2, 3))
    assert_the_oracles_logits_and_ids(line, oracle, tokens(80, vocab=len(vocabulary()[0])), (64, 16))


def test_the_gateway_reads_it(folder: Path) -> None:
    served = load_served("made-up", folder)
    assert (served.window, served.stop_ids) == (CONTEXT, (2,))
    assert (served.defaults.temperature, served.defaults.top_p) == (0.2, 0.9)
    assert served.template is not None
    assert not served.calls_tools
    assert served.vocabulary.special_ids == {0, 1, 2}


def test_text_is_cut_before_digits_and_merged(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello wow 12<|im_end|>").tokens == [
        "hello", "Ġwo", "w", "Ġ", "1", "2", "<|im_end|>"
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("hello Übermut 12 🐟").ids) == "hello Übermut 12 🐟"


def test_the_notice_names_whose_work_it_is(folder: Path) -> None:
    notice = (folder / "NOTICE").read_text()
    assert "Hugging Face" in notice
    assert "Apache-2.0" in notice


def _without(name: str) -> Callable[[GgufWriter], object]:
    return lambda writer: writer.fields.pop(name, None) or writer.tensors.pop(name)


def _with(name: str, kind: object, value: object) -> Callable[[GgufWriter], object]:
    return lambda writer: writer.fields.update({name: (kind, value)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without("llama.rope.freq_base"), "llama.rope.freq_base is missing"),
        (_without("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight has shape None"),
        (_without("tokenizer.chat_template"), "tokenizer.chat_template is missing"),
        (_with("general.architecture", 8, "qwen2"), "architecture 'qwen2'"),
        (_with("llama.attention.head_count_kv", 4, 4), "blk.0.attn_k.weight has shape"),
        (_with("llama.rope.dimension_count", 4, 12), "4 heads of 12 are no 64 channels"),
        (_with("tokenizer.ggml.pre", 8, "llama-bpe"), "cut as 'llama-bpe'"),
        (_with("tokenizer.ggml.model", 8, "llama"), "a 'llama' vocabulary"),
        (_with("tokenizer.ggml.eos_token_id", 4, 9999), "eos_token_id is 9999"),
        (_with("tokenizer.ggml.merges", (9, 8), ["h q"]), "the merge 'h q'"),
        (_with("tokenizer.ggml.token_type", (9, 5), [3]), "not as many types"),
        (
            lambda writer: writer.tensors.update({"rope_freqs.weight": f32(torch.ones(8).numpy())}),
            "rope_freqs.weight is none of a llama model's",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, change: Callable[[GgufWriter], object], told: str
) -> None:
    writer = llama()[0]
    change(writer)
    with pytest.raises(ModelFault) as caught:
        convert(writer.write(tmp_path / "a.gguf"), SMOLLM2, tmp_path)
    assert told in caught.value.message
    assert "a.gguf" in caught.value.message


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    writer, weights = llama()
    writer.tensors["output.weight"] = f32(weights["model.embed_tokens.weight"])
    convert(writer.write(tmp_path / "a.gguf"), SMOLLM2, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
