"""Route traces come back as they were written, and damaged ones are refused."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.formats.route_trace import (
    MOST_RUNS,
    NO_GUESS,
    RouteShape,
    Run,
    read_route_trace,
    write_route_trace,
)

SHAPE = RouteShape(layers=3, experts=10, experts_per_token=2)
IDS = np.random.default_rng(0).integers(10, size=(9, 3, 2)).astype(np.uint16)
GUESSES = np.random.default_rng(1).integers(10, size=(9, 3, 4))
GUESSES[:, 0] = -1
IDENTITY = "0123456789abcdef" * 4
HEADER = 96


def save(path: Path) -> Path:
    with write_route_trace(path, SHAPE, identity_sha256=IDENTITY) as writer:
        writer.append(IDS[:4], "prefill")
        writer.append(IDS[4:5], "decode")
        writer.append(IDS[5:6], "decode")
        writer.append(IDS[6:], "decode", begins_text=True)
    return path


def reseal(data: bytearray) -> bytes:
    """The bytes with checksums that fit them, so that what is behind them gets tested."""
    struct.pack_into("<I", data, 80, zlib.crc32(data[HEADER:]))
    struct.pack_into("<I", data, 84, zlib.crc32(data[:84]))
    return bytes(data)


def patched(path: Path, form: str, offset: int, value: int) -> Path:
    data = bytearray(save(path).read_bytes())
    struct.pack_into(form, data, offset if offset >= 0 else len(data) + offset, value)
    path.write_bytes(reseal(data))
    return path


def test_trace_comes_back(tmp_path: Path) -> None:
    trace = read_route_trace(save(tmp_path / "a"))
    assert np.array_equal(trace.ids, IDS)
    assert trace.shape == SHAPE
    assert trace.identity_sha256 == IDENTITY
    assert trace.runs == (
        Run(0, "prefill", True),
        Run(4, "decode", False),
        Run(6, "decode", True),
    )
    assert [(run.first, end) for run, end in trace.spans()] == [(0, 4), (4, 6), (6, 9)]


def test_unknown_model_stays_unknown(tmp_path: Path) -> None:
    with write_route_trace(tmp_path / "a", SHAPE) as writer:
        writer.append(IDS, "decode")
    assert read_route_trace(tmp_path / "a").identity_sha256 == ""


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    data = save(tmp_path / "a").read_bytes()
    assert data[:8] == b"DSV4RTRC"
    assert struct.unpack_from("<IIIIIIQQ", data, 8) == (1, 96, 3, 10, 2, 0, 9, 3)
    assert data[48:80].hex() == IDENTITY
    assert data[HEADER : HEADER + IDS.nbytes] == IDS.astype("<u2").tobytes()
    assert struct.unpack_from("<QII", data, HEADER + IDS.nbytes + 16) == (4, 2, 0)
    assert len(data) == HEADER + IDS.nbytes + 3 * 16


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[:, :2], r"\[9, 2, 2\], expected \[n, 3, 2\]"),
        (IDS[0], r"expected \[n, 3, 2\]"),
        (IDS + 10, r"must be 0\.\.9"),
        (IDS.astype(np.int64) - 1, r"must be 0\.\.9, found -1"),
    ],
)
def test_ids_that_are_no_experts_are_refused(tmp_path: Path, ids: np.ndarray, message: str) -> None:
    with (
        pytest.raises(ValueError, match=message),
        write_route_trace(tmp_path / "a", SHAPE) as writer,
    ):
        writer.append(ids, "decode")
    assert list(tmp_path.iterdir()) == []


def test_trace_without_tokens_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="has no tokens"),
        write_route_trace(tmp_path / "a", SHAPE) as writer,
    ):
        writer.append(IDS[:0], "decode")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "shape",
    [RouteShape(0, 4, 1), RouteShape(513, 4, 1), RouteShape(2, 4097, 1), RouteShape(2, 4, 5)],
)
def test_shape_that_no_model_has_is_refused(tmp_path: Path, shape: RouteShape) -> None:
    with pytest.raises(ConfigError, match="must be 1"), write_route_trace(tmp_path / "a", shape):
        pass


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file") as caught:
        read_route_trace(tmp_path / "a")
    assert caught.value.fault == "missing"


def test_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        read_route_trace(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            read_route_trace(path)


def test_every_changed_byte_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x5A]) + data[place + 1 :])
        with pytest.raises(FormatError):
            read_route_trace(path)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(FormatError, match="expected for 9 tokens in 3 runs"):
        read_route_trace(path)


@pytest.mark.parametrize(
    ("form", "offset", "value", "message"),
    [
        ("<I", 8, 2, "0 guesses, expected 1..10 in version 2"),
        ("<I", 8, 3, "format version 3, expected 1 or 2"),
        ("<I", 8, 0, "format version 0, expected 1 or 2"),
        ("<I", 12, 104, "header of 104 bytes"),
        ("<I", 16, 0, "layers must be 1..512, found 0"),
        ("<I", 16, 2**32 - 1, "layers must be 1..512"),
        ("<I", 20, 4097, "experts must be 1..4096"),
        ("<I", 24, 11, "experts per token must be 1..10, found 11"),
        ("<I", 24, 0, "experts per token must be 1..10, found 0"),
        ("<I", 28, 1, "1 guesses, expected 0..0 in version 1"),
        ("<Q", 32, 0, "0 tokens in 3 runs"),
        ("<Q", 32, 2**64 - 1, "bytes, .* expected for 18,446,744"),
        ("<Q", 32, 2**62, "expected for 4,611"),
        ("<Q", 40, 0, "9 tokens in 0 runs"),
        ("<Q", 40, 10, "9 tokens in 10 runs"),
        ("<I", 88, 1, "reserved"),
        ("<H", HEADER + 2 * 7, 10, r"expert id 10, expected 0\.\.9 \(at byte 110\)"),
        ("<Q", -48, 1, "runs are damaged"),
        ("<Q", -32, 0, "runs are damaged"),
        ("<Q", -16, 3, "runs are damaged"),
        ("<Q", -16, 9, "runs are damaged"),
        ("<I", -8, 0, "runs are damaged"),
        ("<I", -8, 3, "runs are damaged"),
        ("<I", -4, 2, "runs are damaged"),
        ("<I", -36, 0, "runs are damaged"),
    ],
)
def test_damage_behind_right_checksums_is_named(
    tmp_path: Path, form: str, offset: int, value: int, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        read_route_trace(patched(tmp_path / "a", form, offset, value))


def save_guesses(path: Path) -> Path:
    with write_route_trace(path, SHAPE, identity_sha256=IDENTITY) as writer:
        writer.append(IDS[:4], "prefill", guesses=GUESSES[:4])
        writer.append(IDS[4:], "decode", guesses=GUESSES[4:])
    return path


def test_guesses_come_back(tmp_path: Path) -> None:
    trace = read_route_trace(save_guesses(tmp_path / "a"))
    assert np.array_equal(trace.ids, IDS)
    assert trace.guesses is not None
    assert np.array_equal(trace.guesses, np.where(GUESSES < 0, NO_GUESS, GUESSES))
    assert read_route_trace(save(tmp_path / "b")).guesses is None


def test_layout_of_guesses_is_the_documented_one(tmp_path: Path) -> None:
    data = save_guesses(tmp_path / "a").read_bytes()
    assert struct.unpack_from("<IIIIIIQQ", data, 8) == (2, 96, 3, 10, 2, 4, 9, 2)
    rows = np.concatenate([IDS, GUESSES.astype("<u2")], axis=2).astype("<u2")
    assert data[HEADER : HEADER + rows.nbytes] == rows.tobytes()
    assert len(data) == HEADER + rows.nbytes + 2 * 16


@pytest.mark.parametrize("change", ["truncate", "flip"])
def test_every_damage_to_guesses_is_refused(tmp_path: Path, change: str) -> None:
    path = save_guesses(tmp_path / "a")
    data = path.read_bytes()
    for place in range(len(data)):
        rest = b"" if change == "truncate" else bytes([data[place] ^ 0x5A]) + data[place + 1 :]
        path.write_bytes(data[:place] + rest)
        with pytest.raises(FormatError):
            read_route_trace(path)


@pytest.mark.parametrize(
    ("form", "offset", "value", "message"),
    [
        ("<I", 28, 0, r"0 guesses, expected 1\.\.10 in version 2"),
        ("<I", 28, 11, r"11 guesses, expected 1\.\.10 in version 2"),
        ("<I", 28, 2**32 - 1, r"guesses, expected 1\.\.10"),
        ("<I", 28, 3, "bytes, .* expected for 9 tokens"),
        ("<I", 8, 1, r"4 guesses, expected 0\.\.0 in version 1"),
        ("<H", HEADER + 2 * 6, 10, r"expert id 10, expected 0\.\.9 \(at byte 108\)"),
        ("<H", HEADER + 2 * 8, 10, "a guess is no expert"),
        ("<H", HEADER + 2 * 8, NO_GUESS, "some of its guesses only"),
        ("<H", HEADER + 2 * 2, 3, "some of its guesses only"),
    ],
)
def test_damaged_guesses_behind_right_checksums_are_named(
    tmp_path: Path, form: str, offset: int, value: int, message: str
) -> None:
    path = save_guesses(tmp_path / "a")
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, offset, value)
    path.write_bytes(reseal(data))
    with pytest.raises(FormatError, match=message):
        read_route_trace(path)


@pytest.mark.parametrize(
    ("guesses", "message"),
    [
        (GUESSES[:, :2], r"guesses are \[9, 2, 4\] for ids \[9, 3, 2\]"),
        (GUESSES[:, :, :0], r"guesses must be 1\.\.10, found 0"),
        (np.zeros((9, 3, 11), dtype=np.int64), r"guesses must be 1\.\.10, found 11"),
        (GUESSES + 7, r"guesses must be 0\.\.9, or -1"),
        (GUESSES - 1, r"guesses must be 0\.\.9, or -1"),
    ],
)
def test_guesses_that_are_no_experts_are_refused(
    tmp_path: Path, guesses: np.ndarray, message: str
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        write_route_trace(tmp_path / "a", SHAPE) as writer,
    ):
        writer.append(IDS, "decode", guesses=guesses)
    assert list(tmp_path.iterdir()) == []


def test_tokens_with_guesses_do_not_follow_tokens_without(tmp_path: Path) -> None:
    with write_route_trace(tmp_path / "a", SHAPE) as writer:
        writer.append(IDS, "decode")
        with pytest.raises(ValueError, match="4 guesses, 0 with the tokens before"):
            writer.append(IDS, "decode", guesses=GUESSES)


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(200), bytes(96)])
def test_other_files_are_no_traces(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="not a route trace"):
        read_route_trace(path)


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    before = path.read_bytes()

    def fail(act: Callable[[], None]) -> None:
        with write_route_trace(path, SHAPE) as writer:
            writer.append(IDS, "decode")
            act()

    def raise_it() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail(raise_it)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def one_expert(path: Path, runs: int, guesses: int = 0, tokens: int | None = None) -> Path:
    """A trace of one layer whose tokens all have the expert 0, and guess 0, 1, ..."""
    tokens = tokens or runs
    ids = np.zeros((tokens, 1 + guesses), dtype="<u2")
    ids[:, 1:] = np.arange(guesses)
    table = np.zeros(runs, dtype=[("first", "<u8"), ("kind", "<u4"), ("begins", "<u4")])
    table["first"], table["kind"], table["begins"] = np.arange(runs), 2, 1
    body = ids.tobytes() + table.tobytes()
    version = 2 if guesses else 1
    numbers = (version, 96, 1, 64, 1, guesses, tokens, runs, bytes(32), zlib.crc32(body))
    fields = struct.pack("<8sIIIIIIQQ32sI", b"DSV4RTRC", *numbers)
    path.write_bytes(fields + struct.pack("<I8s", zlib.crc32(fields), bytes(8)) + body)
    return path


@pytest.mark.parametrize(
    ("runs", "guesses", "tokens"),
    [(MOST_RUNS, 0, None), (1, 64, 600_000)],
    ids=["runs", "guesses"],
)
def test_reading_takes_little_more_than_the_file_has(
    tmp_path: Path, runs: int, guesses: int, tokens: int | None
) -> None:
    path = one_expert(tmp_path / "a.trace", runs, guesses, tokens)
    tracemalloc.start()
    try:
        assert len(read_route_trace(path).runs) == runs
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= path.stat().st_size + (64 << 20)


def test_more_runs_than_memory_is_promised_for_are_refused(tmp_path: Path) -> None:
    path = one_expert(tmp_path / "a.trace", MOST_RUNS + 1)
    with pytest.raises(FormatError, match=r"expected 1\.\.524,288 runs"):
        read_route_trace(path)
