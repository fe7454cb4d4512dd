"""The reader of GGUF files: values, tensors, and every way in which a file can be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.models.faults import ModelFault
from services.models.gguf import GgufFile
from tests.unit.services.models.made_up import GgufWriter, Tensor, f32, llama, q4_1, q8_0


def test_fields_of_every_type_come_back(tmp_path: Path) -> None:
    writer = GgufWriter(
        {
            "text": (8, "grüße"),
            "count": (4, 7),
            "signed": (5, -7),
            "real": (6, 1e-5),
            "flag": (7, True),
            "wide": (10, 1 << 40),
            "words": ((9, 8), ["a", "", "ü"]),
            "numbers": ((9, 5), [1, -2, 3]),
        }
    )
    with GgufFile(writer.write(tmp_path / "a.gguf")) as file:
        assert file.text("text") == "grüße"
        assert (file.integer("count"), file.integer("signed"), file.integer("wide")) == (7, -7, 1 << 40)
        assert file.number("real") == 1e-5, "not the float32 nearest to it, written out in double precision"
        assert file.fields["flag"] is True
        assert (file.strings("words"), file.integers("numbers")) == (["a", "", "ü"], [1, -2, 3])


def test_tensors_are_dequantised_and_shaped(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    four, expected_four = q4_1(values)
    eight, expected_eight = q8_0(values)
    writer = GgufWriter(
        tensors={"plain": f32(values), "four": four, "odd": f32(values[0, :5]), "eight": eight}
    )
    with GgufFile(writer.write(tmp_path / "a.gguf")) as file:
        np.testing.assert_array_equal(file.read("plain"), values)
        np.testing.assert_array_equal(file.read("odd"), values[0, :5])
        np.testing.assert_array_equal(file.read("four"), expected_four)
        np.testing.assert_array_equal(file.read("eight"), expected_eight)
        assert np.abs(expected_four - values).max() < 0.3, "the test's own quantisation is one"
        with pytest.raises(ModelFault, match="tensor other is missing"):
            file.read("other")


@pytest.mark.parametrize(
    ("name", "told"), [("text", "expected a int"), ("none", "missing"), ("mixed", "no array of int")]
)
def test_a_field_of_another_type_is_named(tmp_path: Path, name: str, told: str) -> None:
    writer = GgufWriter({"text": (8, "seven"), "mixed": ((9, 8), ["1"])})
    with GgufFile(writer.write(tmp_path / "a.gguf")) as file, pytest.raises(ModelFault, match=told) as caught:
        file.integers(name) if name == "mixed" else file.integer(name)
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (Tensor((2, 32), 12, bytes(40)), "format 12"),
        (Tensor((2, 30), 3, bytes(40)), "rows of 30"),
        (Tensor((1, 1, 1, 1, 1), 0, bytes(4)), "5 dimensions"),
        (Tensor((2, 32), 0, bytes(8)), "ends early"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_named(tmp_path: Path, tensor: Tensor, told: str) -> None:
    path = GgufWriter(tensors={"blk.0.attn_q.weight": tensor}).write(tmp_path / "a.gguf")
    with pytest.raises(ModelFault, match=told):
        GgufFile(path)


@pytest.mark.parametrize("data", [b"", b"GG", b"GGML" + bytes(40), b"GGUF" + b"\x09" + bytes(40)])
def test_another_file_is_no_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFault, match=r"not a GGUF file|GGUF version 9"):
        GgufFile(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_or_damaged_file_is_a_fault_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    whole = llama()[0].write(path).read_bytes()
    begin = data.draw(st.integers(0, 6000))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:begin])
        with pytest.raises(ModelFault):
            GgufFile(path)
        return
    path.write_bytes(whole[:begin] + data.draw(st.binary(min_size=1, max_size=16)) + whole[begin + 16 :])
    try:
        with GgufFile(path) as file:
            for name in file.tensors:
                file.read(name)
    except ModelFault:
        pass
