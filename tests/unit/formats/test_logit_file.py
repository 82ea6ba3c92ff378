"""Saved logits come back as they were written, and damaged files are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from edgedsv4.errors import FormatError
from edgedsv4.formats.logit_file import LogitHeader, read_logits, write_logits

ROWS = np.log(np.random.default_rng(0).dirichlet(np.ones(7), size=5)).astype(np.float32)
HEADER = LogitHeader(7, 4, np.arange(5, dtype="<i4"))


def save(path: Path) -> Path:
    with write_logits(path, HEADER) as writer:
        writer.append(ROWS[:2])
        writer.append(ROWS[2:])
    return path


def read_all(path: Path) -> np.ndarray:
    with read_logits(path) as reader:
        return reader.take(len(reader.header.token_ids))


def test_rows_and_header_come_back(tmp_path: Path) -> None:
    with read_logits(save(tmp_path / "a.npz")) as reader:
        assert (reader.header.vocab_size, reader.header.window) == (7, 4)
        assert reader.header.token_ids.tolist() == [0, 1, 2, 3, 4]
        first, rest = reader.take(1), reader.take(4)
    assert np.array_equal(np.concatenate([first, rest]), ROWS)


def test_numpy_reads_the_file(tmp_path: Path) -> None:
    with np.load(save(tmp_path / "a.npz")) as loaded:
        assert np.array_equal(loaded["log_probs"], ROWS)
        assert loaded["header"].tolist() == [1, 7, 4, 5]


def test_unfinished_file_does_not_appear(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="3 rows were not written"),
        write_logits(tmp_path / "a.npz", HEADER) as writer,
    ):
        writer.append(ROWS[:2])
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz")
    before = path.read_bytes()
    with pytest.raises(RuntimeError), write_logits(path, HEADER):
        raise RuntimeError
    assert path.read_bytes() == before


@pytest.mark.parametrize("rows", [ROWS[:, :6], np.zeros((6, 7), np.float32), ROWS[0]], ids=len)
def test_rows_of_another_shape_are_refused(tmp_path: Path, rows: np.ndarray) -> None:
    with (
        pytest.raises(ValueError, match="expected"),
        write_logits(tmp_path / "a.npz", HEADER) as writer,
    ):
        writer.append(rows)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"absent.npz.*not a file of saved logits"):
        read_all(tmp_path / "absent.npz")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = save(tmp_path / "a.npz").read_bytes()
    for size in range(len(data)):
        (tmp_path / "cut.npz").write_bytes(data[:size])
        with pytest.raises(FormatError):
            read_all(tmp_path / "cut.npz")


def test_flipped_bit_is_refused_or_harmless(tmp_path: Path) -> None:
    data = save(tmp_path / "a.npz").read_bytes()
    for place in range(0, len(data), 3):
        broken = bytearray(data)
        broken[place] ^= 0x10
        (tmp_path / "bad.npz").write_bytes(bytes(broken))
        try:
            found = read_all(tmp_path / "bad.npz")
        except FormatError:
            continue
        assert np.array_equal(found, ROWS)


def rewrite(path: Path, **members: np.ndarray) -> Path:
    arrays: dict[str, np.ndarray] = {
        "header": np.array([1, 7, 4, 5], dtype="<i8"),
        "token_ids": HEADER.token_ids,
        "log_probs": ROWS,
    }
    np.savez(path, **(arrays | members))
    return path


@pytest.mark.parametrize(
    "header",
    [
        [2, 7, 4, 5],
        [1, 0, 4, 5],
        [1, 7, 1, 5],
        [1, 7, 4, 0],
        [1, 7, 4, 1 << 50],
        [1, 1 << 60, 4, 5],
    ],
    ids=str,
)
def test_header_out_of_range_is_refused(tmp_path: Path, header: list[int]) -> None:
    path = rewrite(tmp_path / "a.npz", header=np.array(header, dtype="<i8"))
    with pytest.raises(FormatError):
        read_all(path)


@pytest.mark.parametrize(
    "rows", [ROWS.astype(np.float64), ROWS[:4], np.asfortranarray(ROWS)], ids=["f64", "few", "F"]
)
def test_log_probs_of_another_form_are_refused(tmp_path: Path, rows: np.ndarray) -> None:
    with pytest.raises(FormatError, match="log_probs"):
        read_all(rewrite(tmp_path / "a.npz", log_probs=rows))


def test_nan_is_refused(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[3, 2] = np.nan
    with pytest.raises(FormatError, match="NaN"):
        read_all(rewrite(tmp_path / "a.npz", log_probs=rows))


def test_compressed_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, header=np.array([1, 7, 4, 5]), token_ids=HEADER.token_ids)
    with pytest.raises(FormatError, match="compressed"):
        read_all(path)


def test_missing_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(FormatError, match=r"no member header\.npy"):
        read_all(path)
