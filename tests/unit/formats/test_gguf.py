"""read_gguf on valid files: our own bytes, and files written by the `gguf` package."""

import gc
import lzma
import os
import subprocess
import sys
from pathlib import Path

import gguf
import gguf_bytes as gb
import numpy as np
import pytest

from edgedsv4.errors import FormatError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.gguf import GgufType, read_gguf

ROOT = Path(__file__).resolve().parents[3]
CONVERTER_HEADER = ROOT / "tests" / "data" / "structure" / "mxfp4.header.xz"
CONVERTER_FILE_BYTES = 4_681_536


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return gb.small().write(tmp_path / "small.gguf")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (GgufType.U8, 7),
        (GgufType.I16, 7),
        (GgufType.U64, 7),
        (GgufType.F32, 0.5),
        (GgufType.F64, -0.25),
        (GgufType.BOOL, True),
        (GgufType.STRING, "wörd"),
    ],
)
def test_scalar_has_its_value_and_type(small: Path, kind: GgufType, expected: object) -> None:
    with read_gguf(small) as opened:
        value = opened.metadata[f"scalar.{int(kind)}"]
        assert value == expected
        assert type(value) is type(expected)
        assert opened.value_types[f"scalar.{int(kind)}"] is kind


@pytest.mark.parametrize(
    "kind", [k for k in GgufType if k not in (GgufType.ARRAY, GgufType.STRING)]
)
def test_array_of_numbers_is_a_read_only_view(small: Path, kind: GgufType) -> None:
    with read_gguf(small) as opened:
        value = opened.metadata[f"array.{int(kind)}"]
        assert isinstance(value, np.ndarray)
        assert value.tolist() == [opened.metadata[f"scalar.{int(kind)}"]] * 3
        assert not value.flags.writeable
        assert not value.flags.owndata
        assert opened.value_types[f"array.{int(kind)}"] is kind


def test_array_of_strings_is_a_list(small: Path) -> None:
    with read_gguf(small) as opened:
        assert opened.metadata["array.8"] == ["wörd"] * 3
        assert opened.value_types["array.8"] is GgufType.STRING


def test_nested_array_is_a_list_of_arrays(small: Path) -> None:
    with read_gguf(small) as opened:
        numbers, texts = opened.metadata["nested"]
        assert numbers.tolist() == [-2, -2]
        assert texts == ["a", ""]
        assert opened.value_types["nested"] is GgufType.ARRAY


def test_tensor_record_has_row_major_shape_and_absolute_offset(small: Path) -> None:
    with read_gguf(small) as opened:
        record = opened.tensors["blk.0.ffn_up_exps.weight"]
        assert record.shape == (2, 2, 32)
        assert record.block_type is BLOCK_TYPES["MXFP4"]
        assert record.nbytes == 4 * 17
        assert record.offset == opened.data_offset + 160
        assert record.data().tobytes() == gb.small().data[160:228]


def test_tensors_keep_the_order_of_the_table(small: Path) -> None:
    with read_gguf(small) as opened:
        assert list(opened.tensors) == [
            "token_embd.weight",
            "output_norm.weight",
            "blk.0.ffn_up_exps.weight",
        ]


def test_version_2_is_accepted(tmp_path: Path) -> None:
    made = gb.small()
    made.version = 2
    with read_gguf(made.write(tmp_path / "v2.gguf")) as opened:
        assert opened.version == 2
        assert len(opened.tensors) == 3


def test_missing_padding_after_the_last_tensor_is_accepted(small: Path) -> None:
    with read_gguf(small) as opened:
        assert opened.warnings == ()
        assert opened.files[0].size % 32 != 0


def test_file_without_tensors_needs_no_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gb.Gguf().header())
    with read_gguf(path) as opened:
        assert opened.tensors == {}
        assert opened.warnings == ()


def test_tensors_may_lie_in_any_order(tmp_path: Path) -> None:
    made = gb.Gguf(tensors=[gb.tensor("b", (4,), 0, 32), gb.tensor("a", (4,), 0, 0)])
    made.data = bytes(range(64))
    with read_gguf(made.write(tmp_path / "a.gguf")) as opened:
        assert opened.tensors["a"].data()[0] == 0
        assert opened.tensors["b"].data()[0] == 32


def test_gap_between_tensors_is_accepted(tmp_path: Path) -> None:
    made = gb.Gguf(tensors=[gb.tensor("a", (4,), 0, 0), gb.tensor("b", (4,), 0, 320)])
    made.data = bytes(336)
    with read_gguf(made.write(tmp_path / "a.gguf")) as opened:
        assert len(opened.tensors) == 2


def test_trailing_bytes_are_a_warning(tmp_path: Path) -> None:
    made = gb.small()
    made.data += bytes(-len(made.data) % 32) + b"tail"
    with read_gguf(made.write(tmp_path / "a.gguf")) as opened:
        assert len(opened.warnings) == 1
        assert "4 bytes after the last tensor" in opened.warnings[0]


@pytest.mark.parametrize(
    "text", ["", "\0", "漢字🌕", "Ġthe", "<\uff5cbegin▁of▁sentence\uff5c>", "a" * 70000]
)
def test_token_text_is_kept_exactly(tmp_path: Path, text: str) -> None:
    made = gb.Gguf()
    made.pairs.append(gb.pair("tokens", gb.ARRAY, gb.array(gb.STRING, [gb.string(text)] * 2)))
    with read_gguf(made.write(tmp_path / "a.gguf")) as opened:
        assert opened.metadata["tokens"] == [text] * 2


def test_empty_arrays_are_accepted(tmp_path: Path) -> None:
    made = gb.Gguf()
    for kind in range(13):
        made.pairs.append(gb.pair(f"k{kind}", gb.ARRAY, gb.array(kind, [])))
    with read_gguf(made.write(tmp_path / "a.gguf")) as opened:
        assert all(len(opened.metadata[f"k{kind}"]) == 0 for kind in range(13))


def test_name_of_64_bytes_is_accepted(tmp_path: Path) -> None:
    made = gb.Gguf(tensors=[gb.tensor("n" * 64, (1,))], data=bytes(4))
    with read_gguf(made.write(tmp_path / "a.gguf")) as opened:
        assert list(opened.tensors) == ["n" * 64]


@pytest.mark.parametrize("alignment", [1 << n for n in range(21)])
def test_every_legal_alignment_is_accepted(tmp_path: Path, alignment: int) -> None:
    made = gb.Gguf(tensors=[gb.tensor("a", (1,)), gb.tensor("b", (1,), 0, max(alignment, 4))])
    made.pairs.append(gb.pair("general.alignment", gb.U32, alignment))
    made.alignment = alignment
    made.data = bytes(max(alignment, 4)) + b"\1\2\3\4"
    with read_gguf(made.write(tmp_path / "a.gguf")) as opened:
        assert opened.alignment == alignment
        assert opened.tensors["b"].data().tolist() == [1, 2, 3, 4]


def write_with_package(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "deepseek4")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b", "漢"])
    writer.add_key_value("f", [0.5, 1.5], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32)
    writer.add_tensor("norm.weight", np.arange(6, dtype=np.float32))
    quantized = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("w.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_file_of_the_gguf_package_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_with_package(path)
    theirs = gguf.GGUFReader(path)
    with read_gguf(path) as ours:
        assert ours.metadata["deepseek4.block_count"] == 3
        assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "b", "漢"]
        assert ours.metadata["f"].tolist() == [0.5, 1.5]
        for tensor in theirs.tensors:
            record = ours.tensors[tensor.name]
            assert record.offset == tensor.data_offset
            assert record.shape == tuple(int(dim) for dim in reversed(tensor.shape))
            assert record.data().tobytes() == tensor.data.tobytes()


def test_file_of_the_llama_cpp_converter_is_read_like_the_gguf_package_does(tmp_path: Path) -> None:
    path = tmp_path / "mxfp4.gguf"
    path.write_bytes(lzma.decompress(CONVERTER_HEADER.read_bytes()))
    os.truncate(path, CONVERTER_FILE_BYTES)
    theirs = gguf.GGUFReader(path)
    with read_gguf(path) as ours:
        assert ours.warnings == ()
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            record = ours.tensors[tensor.name]
            assert record.block_type.ggml_id == tensor.tensor_type
            assert (record.offset, record.nbytes) == (tensor.data_offset, tensor.n_bytes)
        for key, value in ours.metadata.items():
            expected = theirs.fields[key].contents()
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected


def test_close_gives_the_descriptors_back(small: Path) -> None:
    before = descriptors()
    read_gguf(small).close()
    assert descriptors() == before


def test_refused_file_gives_the_descriptors_back(tmp_path: Path) -> None:
    path = gb.Gguf(pairs=[]).write(tmp_path / "a.gguf")
    before = descriptors()
    with pytest.raises(FormatError):
        read_gguf(path)
    assert descriptors() == before


def test_tensor_data_outlive_close(small: Path) -> None:
    opened = read_gguf(small)
    data = opened.tensors["output_norm.weight"].data()
    opened.close()
    assert data.tobytes() == gb.small().data[128:148]


def test_replaced_file_is_noticed_before_its_bytes_are_used(small: Path, tmp_path: Path) -> None:
    with read_gguf(small) as opened:
        gb.small().write(tmp_path / "new.gguf").replace(small)
        with pytest.raises(FormatError, match="changed while open"):
            opened.tensors["output_norm.weight"].data()
        with pytest.raises(FormatError, match="changed while open"):
            opened.check_unchanged()


def test_shortened_file_is_noticed_before_its_bytes_are_used(small: Path) -> None:
    with read_gguf(small) as opened:
        os.truncate(small, 1000)
        with pytest.raises(FormatError, match="changed while open"):
            opened.tensors["output_norm.weight"].data()


def test_opening_4_gigabytes_costs_no_memory(tmp_path: Path) -> None:
    made = gb.Gguf(tensors=[gb.tensor("big", (1 << 20, 1 << 12), 24)])
    path = made.write(tmp_path / "a.gguf")
    os.truncate(path, path.stat().st_size + (1 << 32))
    body = """
import sys
from pathlib import Path
from edgedsv4.formats.gguf import read_gguf

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
opened = read_gguf(Path(sys.argv[1]))
data = opened.tensors["big"].data()
print(data.nbytes, resident() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", body, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    nbytes, resident = map(int, done.stdout.split())
    assert nbytes == 1 << 32
    assert resident < 100e6
