"""What GgufWriter writes, judged by the `gguf` package and by our own reader."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgedsv4.errors import CapacityError, ConfigError, ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.gguf import GgufType, read_gguf
from edgedsv4.formats.gguf_write import GgufWriter

F32 = BLOCK_TYPES["F32"]
ROOT = Path(__file__).resolve().parents[3]

SCALARS = [
    (GgufType.U8, 255),
    (GgufType.I8, -128),
    (GgufType.U16, 65535),
    (GgufType.I16, -32768),
    (GgufType.U32, (1 << 32) - 1),
    (GgufType.I32, -(1 << 31)),
    (GgufType.F32, 0.25),
    (GgufType.BOOL, True),
    (GgufType.STRING, "Straße 漢字 🌕"),
    (GgufType.U64, (1 << 64) - 1),
    (GgufType.I64, -(1 << 63)),
    (GgufType.F64, 1e-300),
]


def writer(path: Path, **options: Any) -> GgufWriter:
    made = GgufWriter(path, **options)
    made.add_metadata("general.architecture", "deepseek4", GgufType.STRING)
    return made


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize(("kind", "value"), SCALARS, ids=[kind.name for kind, _ in SCALARS])
def test_scalar_is_read_by_the_gguf_package(tmp_path: Path, kind: GgufType, value: object) -> None:
    made = writer(tmp_path / "a.gguf")
    made.add_metadata("some.key", value, kind)
    made.write()
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["some.key"]
    assert field.types == [gguf.GGUFValueType(int(kind))]
    assert field.contents() == value


@pytest.mark.parametrize(("kind", "value"), SCALARS, ids=[kind.name for kind, _ in SCALARS])
def test_array_is_read_by_the_gguf_package(tmp_path: Path, kind: GgufType, value: object) -> None:
    made = writer(tmp_path / "a.gguf")
    made.add_metadata("some.key", [value, value, value], kind)
    made.write()
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["some.key"]
    assert field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(int(kind))]
    assert field.contents() == [value] * 3


def test_nested_array_is_read_back(tmp_path: Path) -> None:
    made = writer(tmp_path / "a.gguf")
    numbers = np.array([1, 2], np.int16)
    made.add_metadata("nested", [[["a", "b"], ["c"]], [numbers]], GgufType.ARRAY)
    made.write()
    with read_gguf(tmp_path / "a.gguf") as opened:
        strings, arrays = opened.metadata["nested"]
    assert strings == [["a", "b"], ["c"]]
    assert (arrays[0].dtype, arrays[0].tolist()) == (np.int16, [1, 2])


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "MXFP4", "Q2_K", "IQ2_XXS", "I32", "I8"])
def test_tensor_is_read_by_the_gguf_package(tmp_path: Path, name: str) -> None:
    block_type = BLOCK_TYPES[name]
    shape = (2, 3, 512)
    raw = np.random.default_rng(1).bytes(6 * block_type.row_bytes(512))
    made = writer(tmp_path / "a.gguf")
    made.add_tensor("blk.0.ffn_up_exps.weight", shape, block_type, raw)
    made.write()
    tensor = gguf.GGUFReader(tmp_path / "a.gguf").tensors[0]
    assert tensor.name == "blk.0.ffn_up_exps.weight"
    assert tensor.tensor_type == block_type.ggml_id
    assert tuple(tensor.shape) == shape[::-1]
    assert tensor.data.tobytes() == raw


@pytest.mark.parametrize("alignment", [1, 8, 32, 16384, 1 << 20])
def test_tensors_are_aligned(tmp_path: Path, alignment: int) -> None:
    made = writer(tmp_path / "a.gguf", alignment=alignment)
    for n in range(3):
        made.add_tensor(f"t{n}", (n + 1, 5), F32, matrix(n + 1, 5, seed=n))
    made.write()
    with read_gguf(tmp_path / "a.gguf") as opened:
        assert opened.alignment == alignment
        assert opened.warnings == ()
        for n, record in enumerate(opened.tensors.values()):
            assert record.offset % alignment == 0
            assert record.data().tobytes() == matrix(n + 1, 5, seed=n).tobytes()


def test_tensors_keep_their_order(tmp_path: Path) -> None:
    made = writer(tmp_path / "a.gguf")
    names = ["z", "a", "m"]
    for name in names:
        made.add_tensor(name, (1,), F32, bytes(4))
    made.write()
    with read_gguf(tmp_path / "a.gguf") as opened:
        assert list(opened.tensors) == names


def test_file_without_tensors_is_complete(tmp_path: Path) -> None:
    writer(tmp_path / "a.gguf").write()
    with read_gguf(tmp_path / "a.gguf") as opened:
        assert opened.tensors == {}
        assert opened.warnings == ()


def test_split_set_has_the_names_and_keys_of_gguf_split(tmp_path: Path) -> None:
    made = writer(tmp_path / "model.gguf", max_tensors=2)
    for n in range(5):
        made.add_tensor(f"t{n}", (4, 8), F32, matrix(4, 8, seed=n))
    paths = made.write()
    assert [path.name for path in paths] == [
        "model-00001-of-00003.gguf",
        "model-00002-of-00003.gguf",
        "model-00003-of-00003.gguf",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for number, path in enumerate(paths):
        part = gguf.GGUFReader(path)
        fields = {key: part.fields[f"split.{key}"] for key in ("no", "count", "tensors.count")}
        assert [field.contents() for field in fields.values()] == [number, 3, 5]
        assert [field.types[0].name for field in fields.values()] == ["UINT16", "UINT16", "INT32"]
        assert ("general.architecture" in part.fields) == (number == 0)
        assert [t.name for t in part.tensors] == [f"t{n}" for n in range(5)][2 * number :][:2]


def test_split_set_is_read_as_one_file(tmp_path: Path) -> None:
    made = writer(tmp_path / "model.gguf", max_tensors=2, alignment=64)
    for n in range(5):
        made.add_tensor(f"t{n}", (4, 8), F32, matrix(4, 8, seed=n))
    paths = made.write()
    with read_gguf(paths[1]) as opened:
        assert opened.metadata["general.architecture"] == "deepseek4"
        for n in range(5):
            assert opened.tensors[f"t{n}"].data().tobytes() == matrix(4, 8, seed=n).tobytes()


def test_model_that_fits_one_part_is_not_split(tmp_path: Path) -> None:
    made = writer(tmp_path / "model.gguf", max_tensors=2)
    made.add_tensor("t", (1,), F32, bytes(4))
    assert made.write() == (tmp_path / "model.gguf",)


def test_memory_map_is_written_without_copy(tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    matrix(8, 32).tofile(source)
    mapped = np.memmap(source, np.uint8, mode="r")
    made = writer(tmp_path / "a.gguf")
    made.add_tensor("t", (8, 32), F32, mapped)
    made.write()
    with read_gguf(tmp_path / "a.gguf") as opened:
        assert opened.tensors["t"].data().tobytes() == matrix(8, 32).tobytes()


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        pytest.param("", 1, GgufType.U8, id="empty_key"),
        pytest.param("a\0b", 1, GgufType.U8, id="nul_in_key"),
        pytest.param("k" * 65536, 1, GgufType.U8, id="long_key"),
        pytest.param("\ud800", 1, GgufType.U8, id="surrogate_in_key"),
        pytest.param("general.architecture", "b", GgufType.STRING, id="key_twice"),
        pytest.param("general.alignment", 64, GgufType.U32, id="key_of_the_writer"),
        pytest.param("k", 256, GgufType.U8, id="number_too_large"),
        pytest.param("k", 1 << 70, GgufType.U64, id="number_over_64_bits"),
        pytest.param("k", -1, GgufType.U64, id="negative_unsigned"),
        pytest.param("k", 1.5, GgufType.U32, id="fraction_as_integer"),
        pytest.param("k", 1e300, GgufType.F32, id="float_too_large"),
        pytest.param("k", True, GgufType.U8, id="bool_as_number"),
        pytest.param("k", 1, GgufType.BOOL, id="number_as_bool"),
        pytest.param("k", "1", GgufType.U8, id="text_as_number"),
        pytest.param("k", 1, GgufType.STRING, id="number_as_text"),
        pytest.param("k", "\ud800", GgufType.STRING, id="surrogate_in_text"),
        pytest.param("k", 1, GgufType.ARRAY, id="number_as_array"),
        pytest.param("k", [1], GgufType.ARRAY, id="numbers_as_arrays"),
        pytest.param("k", [np.zeros(1, np.complex64)], GgufType.ARRAY, id="complex_array"),
        pytest.param("k", ["a", 1], GgufType.STRING, id="mixed_array"),
        pytest.param("k", [[1], [2]], GgufType.U8, id="nested_as_flat"),
        pytest.param("k", [-1, (1 << 64) - 1], GgufType.I64, id="array_over_64_bits"),
    ],
)
def test_metadata_that_would_not_come_back_is_refused(
    tmp_path: Path, key: str, value: object, kind: GgufType
) -> None:
    with pytest.raises(ConfigError):
        writer(tmp_path / "a.gguf").add_metadata(key, value, kind)


@pytest.mark.parametrize("alignment", [0, 3, -8, 1 << 21])
def test_illegal_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(ConfigError, match="alignment"):
        GgufWriter(tmp_path / "a.gguf", alignment=alignment)


def test_illegal_max_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tensors"):
        GgufWriter(tmp_path / "a.gguf", max_tensors=0)


def test_split_name_without_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.gguf"):
        GgufWriter(tmp_path / "a.bin", max_tensors=1)


@pytest.mark.parametrize("name", ["", "n" * 65, "a\0"], ids=["empty", "long", "nul"])
def test_illegal_tensor_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="tensor name"):
        writer(tmp_path / "a.gguf").add_tensor(name, (1,), F32, bytes(4))


def test_tensor_twice_is_refused(tmp_path: Path) -> None:
    made = writer(tmp_path / "a.gguf")
    made.add_tensor("t", (1,), F32, bytes(4))
    with pytest.raises(ConfigError, match="already set"):
        made.add_tensor("t", (1,), F32, bytes(4))


def test_type_that_gguf_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FP8_E4M3"):
        writer(tmp_path / "a.gguf").add_tensor("t", (4,), BLOCK_TYPES["FP8_E4M3"], bytes(4))


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 1), (0,), (2, -1)])
def test_illegal_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="dims"):
        writer(tmp_path / "a.gguf").add_tensor("t", shape, F32, b"")


def test_row_that_is_no_multiple_of_the_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        writer(tmp_path / "a.gguf").add_tensor("t", (2, 48), BLOCK_TYPES["Q8_0"], bytes(102))


def test_data_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"16 bytes,\s+found 15"):
        writer(tmp_path / "a.gguf").add_tensor("t", (4,), F32, bytes(15))


def test_strided_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="contiguous"):
        writer(tmp_path / "a.gguf").add_tensor("t", (4, 4), F32, matrix(4, 4).T)


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        writer(tmp_path / "a.gguf").write()
    finally:
        os.umask(old)
    assert (tmp_path / "a.gguf").stat().st_mode & 0o777 == 0o640


def test_existing_file_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.gguf"
    target.write_bytes(b"old")
    writer(target).write()
    assert target.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "model-00001-of-00002.gguf").write_bytes(b"old")
    made = writer(tmp_path / "model.gguf", max_tensors=1)
    made.add_tensor("a", (1,), F32, bytes(4))
    made.add_tensor("b", (1,), F32, bytes(4))
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CapacityError, match="disk"):
        made.write()
    assert [path.name for path in tmp_path.iterdir()] == ["model-00001-of-00002.gguf"]
    assert (tmp_path / "model-00001-of-00002.gguf").read_bytes() == b"old"


def test_file_size_limit_leaves_nothing_behind(tmp_path: Path) -> None:
    body = f"""
import resource, signal, sys
from pathlib import Path
from edgedsv4.errors import CapacityError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.gguf_write import GgufWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))
made = GgufWriter(Path({str(tmp_path / "a.gguf")!r}))
made.add_tensor("t", (1_000_000,), BLOCK_TYPES["I8"], bytes(1_000_000))
try:
    made.write()
except CapacityError as error:
    print(error.needed_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", body],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert done.stdout == "1000064\n"  # with the header
    assert list(tmp_path.iterdir()) == []


def test_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer(tmp_path / "a.gguf").write()
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_reported_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        writer(tmp_path / "none" / "a.gguf").write()
