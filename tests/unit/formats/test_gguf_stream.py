"""What `stream_gguf` writes, judged by `GgufWriter`'s files and our reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgedsv4.errors import ConfigError, ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.formats.gguf import GgufType, read_gguf
from edgedsv4.formats.gguf_stream import MetadataEntry, StreamedFile, StreamedTensor, stream_gguf
from edgedsv4.formats.gguf_write import GgufWriter

F32 = BLOCK_TYPES["F32"]
ENTRIES = (
    MetadataEntry("general.architecture", "deepseek4", GgufType.STRING),
    MetadataEntry("some.numbers", np.arange(5, dtype=np.int32), GgufType.I32),
)
DATA = {"a": np.arange(7.0), "b": np.arange(24.0).reshape(2, 3, 4), "c": np.ones((1, 9))}


def tensor(name: str, values: np.ndarray, kind: BlockType = F32) -> StreamedTensor:
    """A tensor that comes in pieces of five bytes."""
    raw = np.frombuffer(values.astype("<f4").tobytes(), dtype=np.uint8)

    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, len(raw), 5):
            yield raw[start : start + 5]

    return StreamedTensor(name, values.shape, kind, pieces)


def file(path: Path, *entries: MetadataEntry) -> StreamedFile:
    tensors = tuple(tensor(name, values) for name, values in DATA.items())
    return StreamedFile(path, entries or ENTRIES, tensors)


def test_file_is_the_one_that_the_collecting_writer_makes(tmp_path: Path) -> None:
    assert stream_gguf([file(tmp_path / "a.gguf")]) == (tmp_path / "a.gguf",)
    writer = GgufWriter(tmp_path / "b.gguf")
    for entry in ENTRIES:
        writer.add_metadata(entry.key, entry.value, entry.value_type)
    for name, values in DATA.items():
        writer.add_tensor(name, values.shape, F32, values.astype("<f4"))
    writer.write()
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_parts_hold_as_much_as_fits(tmp_path: Path) -> None:
    written = stream_gguf([file(tmp_path / "m.gguf")], split_max_bytes=32 + 96)
    assert [path.name for path in written] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    with read_gguf(written[1]) as opened:
        for name, values in DATA.items():
            np.testing.assert_array_equal(
                opened.tensors[name].data().view("<f4"), values.ravel().astype("<f4")
            )
        assert opened.metadata["some.numbers"].tolist() == list(range(5))  # type: ignore[union-attr]


def test_tensor_larger_than_a_part_is_not_cut(tmp_path: Path) -> None:
    assert len(stream_gguf([file(tmp_path / "m.gguf")], split_max_bytes=1)) == len(DATA)


def test_every_piece_is_counted(tmp_path: Path) -> None:
    seen: list[int] = []
    stream_gguf([file(tmp_path / "a.gguf")], on_bytes=seen.append)
    assert sum(seen) == sum(4 * values.size for values in DATA.values())


def test_what_the_counter_raises_ends_the_writing(tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        stream_gguf([file(tmp_path / "a.gguf"), file(tmp_path / "b.gguf")], on_bytes=stop)
    assert list(tmp_path.iterdir()) == []


def test_pieces_of_another_length_are_refused(tmp_path: Path) -> None:
    short = StreamedTensor("t", (4,), F32, lambda: [np.zeros(15, dtype=np.uint8)])
    with pytest.raises(ShapeError, match=r"tensor t: \[4\] of F32 is 16 bytes, found 15"):
        stream_gguf([StreamedFile(tmp_path / "a.gguf", ENTRIES, [short])])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((), "F32", "1..4 dims"),
        ((1, 1, 1, 1, 1), "F32", "1..4 dims"),
        ((0,), "F32", "1..4 dims"),
        ((2, 33), "Q8_0", "multiple of 32"),
    ],
)
def test_shapes_that_gguf_cannot_hold_are_refused(
    tmp_path: Path, shape: tuple[int, ...], kind: str, message: str
) -> None:
    bad = StreamedTensor("t", shape, BLOCK_TYPES[kind], lambda: [])
    with pytest.raises(ShapeError, match=message):
        stream_gguf([StreamedFile(tmp_path / "a.gguf", ENTRIES, [bad])])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([*ENTRIES, ENTRIES[0]], "set twice"),
        ([MetadataEntry("split.no", 0, GgufType.U16)], "writer sets itself"),
        ([MetadataEntry("x", -1, GgufType.U32)], "does not fit U32"),
        ([MetadataEntry("", 1, GgufType.U32)], "key"),
    ],
)
def test_metadata_that_cannot_be_written_are_refused(
    tmp_path: Path, entries: list[MetadataEntry], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        stream_gguf([file(tmp_path / "a.gguf", *entries)])


def test_type_of_another_format_is_refused(tmp_path: Path) -> None:
    bad = StreamedTensor("t", (4,), BLOCK_TYPES["FP8_E4M3"], lambda: [])
    with pytest.raises(ConfigError, match="no type FP8_E4M3"):
        stream_gguf([StreamedFile(tmp_path / "a.gguf", ENTRIES, [bad])])


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = [tensor("t", np.ones(2)), tensor("t", np.ones(3))]
    with pytest.raises(ConfigError, match="tensor 't' is set twice"):
        stream_gguf([StreamedFile(tmp_path / "a.gguf", ENTRIES, twice)])


def test_one_path_for_two_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="same path"):
        stream_gguf([file(tmp_path / "a.gguf"), file(tmp_path / "a.gguf")])


def test_directory_as_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a directory"):
        stream_gguf([file(tmp_path)])


@pytest.mark.parametrize("limit", [0, -5])
def test_parts_of_no_size_are_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="split_max_bytes"):
        stream_gguf([file(tmp_path / "a.gguf")], split_max_bytes=limit)
