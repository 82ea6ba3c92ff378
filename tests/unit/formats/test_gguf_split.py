"""Split sets: any part opens the whole model, and parts that do not belong together are refused."""

import gc
import re
import shutil
from pathlib import Path

import gguf
import gguf_bytes as gb
import numpy as np
import pytest

from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf import GgufType, read_gguf

PARTS = 3


def split_pairs(number: int, count: int = PARTS, total: int = 4) -> list[bytes]:
    return [
        gb.pair("split.no", gb.U16, number),
        gb.pair("split.count", gb.U16, count),
        gb.pair("split.tensors.count", gb.I32, total),
    ]


def part(number: int) -> gb.Gguf:
    """Part `number` (0-based) of a set of three: no tensor, two tensors, two tensors."""
    model = [gb.ARCHITECTURE, gb.pair("general.name", gb.STRING, "one")] if number == 0 else []
    names = [] if number == 0 else [f"t{number}a", f"t{number}b"]
    tensors = [gb.tensor(name, (4,), 0, 32 * n) for n, name in enumerate(names)]
    return gb.Gguf([*model, *split_pairs(number)], tensors, bytes([number]) * (32 * len(names)))


def name(number: int, count: int = PARTS) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a valid set."""
    for number in range(PARTS):
        part(number).write(tmp_path / name(number))
    return tmp_path


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def refusal(path: Path, message: str) -> FormatError:
    before = descriptors()
    with pytest.raises(FormatError, match=message) as caught:
        read_gguf(path)
    # The frames of the traceback keep the mapping alive.
    error = caught.value.with_traceback(None)
    del caught
    assert descriptors() == before
    return error


@pytest.mark.parametrize("number", range(PARTS))
def test_any_part_opens_the_whole_set(folder: Path, number: int) -> None:
    with read_gguf(folder / name(number)) as opened:
        assert opened.path == folder / name(number)
        assert opened.metadata["general.name"] == "one"
        assert list(opened.tensors) == ["t1a", "t1b", "t2a", "t2b"]
        assert [file.path.name for file in opened.files] == [name(n) for n in range(PARTS)]
        for key, record in opened.tensors.items():
            assert record.data().tolist() == [int(key[1])] * 16


def test_set_written_by_the_gguf_package_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "deepseek4", split_max_tensors=2)
    for n in range(5):
        writer.add_tensor(f"t{n}", np.full(8, n, np.float32))
    writer.write_header_to_file(tmp_path / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with read_gguf(tmp_path / "model-00002-of-00003.gguf") as opened:
        assert opened.metadata["general.architecture"] == "deepseek4"
        for n in range(5):
            assert set(opened.tensors[f"t{n}"].data().view(np.float32)) == {n}


def test_each_part_keeps_its_own_alignment(folder: Path) -> None:
    odd = part(1)
    odd.pairs.append(gb.pair("general.alignment", gb.U32, 8))
    odd.alignment = 8
    odd.tensors[1] = gb.tensor("t1b", (4,), 0, 40)
    odd.data = bytes(40) + bytes([9] * 16)
    odd.write(folder / name(1))
    with read_gguf(folder / name(0)) as opened:
        assert opened.alignment == 32
        assert opened.tensors["t1b"].data().tolist() == [9] * 16


def test_warnings_of_all_parts_are_kept(folder: Path) -> None:
    long = part(2)
    long.data += b"tail"
    long.write(folder / name(2))
    with read_gguf(folder / name(0)) as opened:
        assert len(opened.warnings) == 1
        assert name(2) in opened.warnings[0]


def test_close_closes_every_part(folder: Path) -> None:
    before = descriptors()
    read_gguf(folder / name(0)).close()
    assert descriptors() == before


@pytest.mark.parametrize("missing", range(1, PARTS))
def test_missing_part_is_named(folder: Path, missing: int) -> None:
    (folder / name(missing)).unlink()
    refusal(folder / name(0), f"of its 3 parts are missing beside it: {name(missing)}")


def test_missing_first_part_is_named(folder: Path) -> None:
    (folder / name(0)).unlink()
    refusal(folder / name(2), name(0))


def test_many_missing_parts_are_not_all_named(tmp_path: Path) -> None:
    lonely = gb.Gguf([gb.ARCHITECTURE, *split_pairs(0, 65535, 0)])
    lonely.write(tmp_path / name(0, 65535))
    error = refusal(tmp_path / name(0, 65535), "of its 65535 parts are missing")
    assert str(error).endswith(f"{name(8, 65535)} and more")


def test_part_under_another_name_says_how_it_must_be_named(folder: Path) -> None:
    shutil.copy(folder / name(1), folder / "renamed.gguf")
    refusal(folder / "renamed.gguf", r"part 2 of 3 .* named like NAME-00002-of-00003\.gguf")


def test_copy_of_a_part_under_another_number(folder: Path) -> None:
    shutil.copy(folder / name(1), folder / name(2))
    refusal(folder / name(0), r"split\.no is 1, the file name says 2")


def test_count_in_the_name_differs_from_the_file(folder: Path) -> None:
    shutil.copy(folder / name(0), folder / name(0, 2))
    refusal(folder / name(0, 2), r"split\.count is 3, the file name says 2")


@pytest.mark.parametrize(
    "odd", ["model-00004-of-00003.gguf", "model-00000-of-00003.gguf", "model-000002-of-00003.gguf"]
)
def test_number_in_the_name_that_no_part_has(folder: Path, odd: str) -> None:
    shutil.copy(folder / name(1), folder / odd)
    refusal(folder / odd, f"must be named {name(1)}")


def test_count_in_one_part_differs_from_the_others(folder: Path) -> None:
    odd = part(1)
    odd.pairs = split_pairs(1, count=4)
    odd.write(folder / name(1))
    refusal(folder / name(0), r"split\.count is 4, the other parts say 3")


def test_total_in_one_part_differs_from_the_others(folder: Path) -> None:
    odd = part(2)
    odd.pairs = split_pairs(2, total=5)
    odd.write(folder / name(2))
    refusal(folder / name(0), "split.tensors.count is 5, the 3 parts hold 4")


def test_total_differs_from_the_tensors_present(folder: Path) -> None:
    short = part(2)
    short.tensors.pop()
    short.write(folder / name(2))
    refusal(folder / name(0), "parts of different models")


def test_tensor_in_two_parts(folder: Path) -> None:
    twin = part(2)
    twin.tensors[0] = gb.tensor("t1a", (4,), 0, 0)
    twin.write(folder / name(2))
    refusal(folder / name(1), f"tensor t1a is already in {name(1)}")


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(gb.pair("general.name", gb.STRING, "two"), id="other_text"),
        pytest.param(gb.pair("general.name", gb.U32, 1), id="other_type"),
        pytest.param(
            gb.pair("general.name", gb.ARRAY, gb.array(gb.STRING, [gb.string("one")])),
            id="array",
        ),
    ],
)
def test_part_of_another_model(folder: Path, pair: bytes) -> None:
    other = part(1)
    other.pairs.append(pair)
    other.write(folder / name(1))
    refusal(folder / name(0), "general.name differs from .*: parts of different models")


def test_metadata_repeated_in_every_part_are_accepted(folder: Path) -> None:
    nan = gb.pair("a.nan", gb.F32, float("nan"))
    numbers = gb.pair("a.numbers", gb.ARRAY, gb.array(gb.I32, [gb.u32(1)]))
    texts = gb.pair("a.texts", gb.ARRAY, gb.array(gb.STRING, [gb.string("x")]))
    for number in range(PARTS):
        same = part(number)
        same.pairs += [nan, numbers, texts]
        same.write(folder / name(number))
    with read_gguf(folder / name(0)) as opened:
        assert opened.metadata["a.texts"] == ["x"]


def test_damaged_part_is_named(folder: Path) -> None:
    (folder / name(1)).write_bytes(b"GGUF")
    error = refusal(folder / name(0), "version")
    assert error.path == folder / name(1)


def test_truncated_part_is_named(folder: Path) -> None:
    whole = (folder / name(2)).read_bytes()
    (folder / name(2)).write_bytes(whole[:-40])
    error = refusal(folder / name(0), "truncated download")
    assert error.path == folder / name(2)


def test_directory_in_place_of_a_part(folder: Path) -> None:
    (folder / name(1)).unlink()
    (folder / name(1)).mkdir()
    refusal(folder / name(0), "is a directory")


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("split.no", gb.STRING, "0"),
        ("split.no", gb.F32, 0.0),
        ("split.no", gb.BOOL, False),
        ("split.count", gb.STRING, "3"),
        ("split.count", gb.F64, 3.0),
        ("split.count", gb.I32, -3),
        ("split.count", gb.U64, (1 << 64) - 1),
        ("split.tensors.count", gb.BOOL, True),
        ("split.tensors.count", gb.I64, -1),
    ],
)
def test_split_key_of_the_wrong_type_or_range(
    folder: Path, key: str, kind: int, value: float | str
) -> None:
    odd = part(0)
    index = 2 + ["split.no", "split.count", "split.tensors.count"].index(key)
    odd.pairs[index] = gb.pair(key, kind, value)
    odd.write(folder / name(0))
    refusal(folder / name(0), rf"{re.escape(key)} is .*expected")


@pytest.mark.parametrize("index", [2, 4], ids=["split.no", "split.tensors.count"])
def test_split_key_missing(folder: Path, index: int) -> None:
    odd = part(0)
    odd.pairs.pop(index)
    odd.write(folder / name(0))
    refusal(folder / name(0), "is missing, expected an integer")


def test_zero_parts(folder: Path) -> None:
    odd = part(0)
    odd.pairs[3] = gb.pair("split.count", gb.U16, 0)
    odd.write(folder / name(0))
    refusal(folder / name(0), "split.count is 0")


@pytest.mark.parametrize("count", [2, (1 << 31) - 1])
def test_more_parts_than_files_costs_no_time(tmp_path: Path, count: int) -> None:
    lonely = gb.Gguf([gb.ARCHITECTURE, gb.pair("split.no", gb.U32, 0)])
    lonely.pairs.append(gb.pair("split.count", gb.U32, count))
    path = lonely.write(tmp_path / f"model-00001-of-{count:05d}.gguf")
    refusal(path, "parts")


def test_set_of_one_file_is_accepted(tmp_path: Path) -> None:
    single = gb.Gguf([gb.ARCHITECTURE, *split_pairs(0, count=1, total=0)])
    with read_gguf(single.write(tmp_path / "any.gguf")) as opened:
        assert opened.warnings == ()


@pytest.mark.parametrize(("number", "total"), [(1, 0), (0, 7)])
def test_set_of_one_file_that_contradicts_itself(tmp_path: Path, number: int, total: int) -> None:
    single = gb.Gguf([gb.ARCHITECTURE, *split_pairs(number, count=1, total=total)])
    refusal(single.write(tmp_path / "any.gguf"), "split")


def test_whole_model_named_like_a_part_is_a_warning(tmp_path: Path) -> None:
    path = gb.Gguf().write(tmp_path / name(0))
    with read_gguf(path) as opened:
        assert "complete by itself" in opened.warnings[0]


def test_part_replaced_while_open_is_noticed(folder: Path) -> None:
    with read_gguf(folder / name(0)) as opened:
        part(2).write(folder / "new.gguf").replace(folder / name(2))
        opened.tensors["t1a"].data()
        with pytest.raises(FormatError, match="changed while open"):
            opened.tensors["t2a"].data()
        with pytest.raises(FormatError, match="changed while open"):
            opened.check_unchanged()


def test_value_types_are_those_of_the_first_part(folder: Path) -> None:
    with read_gguf(folder / name(2)) as opened:
        assert opened.value_types["split.count"] is GgufType.U16
