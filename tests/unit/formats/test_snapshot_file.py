"""Snapshot files as bytes: what is sound is read, everything else is refused with its place."""

from __future__ import annotations

import errno
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_samples import (
    HEADER,
    PREAMBLE,
    TURNS,
    body_of,
    edited,
    header_of,
    offsets,
    read_all,
    sample,
    section_of,
    signed,
    with_section,
)

from edgedsv4.errors import ConfigError, SnapshotError, StorageError
from edgedsv4.formats.snapshot_file import Meter, inspect_snapshot, open_snapshot
from edgedsv4.formats.snapshot_header import MAX_TURN_BYTES, SECTIONS
from edgedsv4.formats.snapshot_turns import decode_turns, encode_turns
from edgedsv4.formats.snapshot_write import save_file, write_snapshot

DATA = sample()
Edit = Callable[[dict[str, Any]], object]


def refused(data: bytes) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        read_all(data)
    return caught.value


def patched(offset: int, *new: int) -> bytes:
    return DATA[:offset] + bytes(new) + DATA[offset + len(new) :]


def test_written_header_is_read_back() -> None:
    info = inspect_snapshot(DATA)
    assert info.header == HEADER
    assert (info.length, info.capacity, info.turn_positions) == (9, 20, (5,))
    assert (info.model.name, info.layout.profile) == ("tiny", "default")


def test_sections_follow_each_other_to_the_end() -> None:
    sections = inspect_snapshot(DATA).sections
    assert tuple(section.name for section in sections) == SECTIONS
    ends = [section.offset + section.nbytes for section in sections]
    assert [section.offset for section in sections[1:]] == ends[:-1]
    assert ends[-1] == len(DATA)


def test_all_bytes_are_read_from_memory_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.dsv4s").write_bytes(DATA)
    sources = (DATA, bytearray(DATA), memoryview(DATA), tmp_path / "a.dsv4s")
    for source in (*sources, str(tmp_path / "a.dsv4s")):
        assert read_all(source) == list(SECTIONS)


def test_inspection_is_json() -> None:
    found = inspect_snapshot(DATA).to_json()
    assert json.loads(json.dumps(found))["sections"] == found["sections"]
    assert found["tokens"] == 9
    assert found["bytes"] == len(DATA)


def test_every_flipped_byte_is_noticed() -> None:
    for place in range(len(DATA)):
        refused(patched(place, DATA[place] ^ (1 + place % 255)))


def test_every_truncation_is_noticed() -> None:
    for length in range(len(DATA)):
        assert refused(DATA[:length]).fault in ("truncated", "format")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_cut_at_a_section_boundary_is_called_truncated(name: str) -> None:
    error = refused(DATA[: offsets(DATA)[name]])
    assert error.fault == "truncated"
    assert f"of {len(DATA):,} bytes present: truncated" in str(error)


@pytest.mark.parametrize("name", [name for name in SECTIONS if section_of(DATA, name)])
def test_a_damaged_section_is_named_with_its_place_and_both_checksums(name: str) -> None:
    place = offsets(DATA)[name]
    error = refused(patched(place, DATA[place] ^ 64))
    assert error.fault == "checksum"
    assert error.offset == place
    assert f"section {name} is damaged: its SHA-256 is " in str(error)
    assert ", expected " in str(error)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "0 bytes, expected at least 64", id="empty"),
        pytest.param(b"GGUF" + DATA[4:], "is not a saved session", id="magic"),
        pytest.param(patched(6, 10, 13), "is not a saved session", id="magic after text transfer"),
        pytest.param(patched(8, 0), "format version 0, this program reads 1", id="version 0"),
        pytest.param(patched(8, 2), "format version 2", id="version 2"),
        pytest.param(patched(8, 255, 255, 255, 255), "format version 4294967295", id="version max"),
        pytest.param(patched(12, 10, 11, 12, 13), "big-endian", id="big-endian"),
        pytest.param(patched(12, 0), "byte order mark is 0x", id="no byte order"),
        pytest.param(patched(16, 0, 0, 0), "the header has 0 bytes", id="no header"),
        pytest.param(patched(16, *[255] * 8), "expected 2..", id="header past the end"),
        pytest.param(patched(24, *[255] * 8), "bytes present: truncated", id="size past the end"),
        pytest.param(DATA + b"\0", "1 trailing bytes", id="trailing"),
        pytest.param(DATA + DATA, "trailing bytes", id="two in one"),
    ],
)
def test_broken_preamble_is_refused(data: bytes, message: str) -> None:
    assert message in str(refused(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"[]", "must hold a JSON object", id="array"),
        pytest.param(b"{ ", "not usable JSON", id="not JSON"),
        pytest.param(b"{}", "layout is missing", id="empty object"),
        pytest.param(b'{"a":1,"a":1}', "appears twice", id="name twice"),
        pytest.param(b'{"a":NaN}', "NaN is not a JSON number", id="NaN"),
        pytest.param(b'{"a":"\xff"}', "not usable JSON", id="not UTF-8"),
        pytest.param(b"[" * 100_000, "nested too deep", id="nested"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", "an integer of 5000 digits", id="long number"),
    ],
)
def test_header_that_is_no_header_is_refused(text: bytes, message: str) -> None:
    assert message in str(refused(signed(text, b"")))


def put(*path: Any, value: Any) -> Edit:
    def edit(header: dict[str, Any]) -> None:
        place: Any = header
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return edit


def drop(*path: Any) -> Edit:
    def edit(header: dict[str, Any]) -> None:
        place: Any = header
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(put("tokens", value=8), "for 8 tokens", id="fewer tokens"),
        pytest.param(put("tokens", value=10), "for 10 tokens", id="more tokens"),
        pytest.param(put("tokens", value=-1), "tokens must be 0..", id="negative tokens"),
        pytest.param(put("tokens", value=1 << 63), "tokens must be 0..", id="tokens 2^63"),
        pytest.param(put("tokens", value=9.0), "tokens must be 0..", id="tokens a float"),
        pytest.param(put("tokens", value=True), "tokens must be 0..", id="tokens a bool"),
        pytest.param(put("capacity", value=8), "capacity must be 9..", id="capacity below tokens"),
        pytest.param(put("rings", 0, value=3), "rings[0] must be 4..8", id="more than a ring"),
        pytest.param(put("rings", 0, value=9), "rings[0] must be 4..8", id="less than the window"),
        pytest.param(put("rings", 3, value=5), "rings[3] must be 0..4", id="pooled row missing"),
        pytest.param(put("rings", value=[0]), "rings must be 6 positions", id="a ring missing"),
        pytest.param(put("rings", value=None), "rings must be a list", id="no rings"),
        pytest.param(put("rings", 1, value=5), "window_rows has", id="fewer window rows"),
        pytest.param(put("streams_first", value=9), "must be 0..8", id="no stream left"),
        pytest.param(put("streams_first", value=None), "draft_streams has", id="streams denied"),
        pytest.param(put("has_logits", value=False), "section logits has 20", id="logits denied"),
        pytest.param(put("has_logits", value=1), "must be true or false", id="flag a number"),
        pytest.param(put("totals", value=[1]), "totals must be three", id="totals"),
        pytest.param(put("totals", 0, value=-1), "totals must be 0..", id="negative total"),
        pytest.param(put("checkpoints", 0, "position", value=10), "1..9", id="checkpoint past end"),
        pytest.param(put("checkpoints", 0, "position", value=0), "1..9", id="checkpoint at 0"),
        pytest.param(put("checkpoints", 0, "rings", 0, value=5), "0..4", id="checkpoint ring"),
        pytest.param(put("checkpoints", value=[]), "checkpoints has", id="checkpoint denied"),
        pytest.param(put("checkpoints", value=[1]), "must be an object", id="checkpoint a number"),
        pytest.param(put("checkpoints", value=[{}] * 65), "at most 64", id="many checkpoints"),
        pytest.param(put("layout", value=3), "layout must be an object", id="layout a number"),
        pytest.param(put("layout", "window", value=0), "layout.window must", id="no window"),
        pytest.param(put("layout", "row_bytes", value=[]), "one or two sizes", id="row of no part"),
        pytest.param(put("layout", "row_bytes", 0, value=4), "has", id="wider rows"),
        pytest.param(put("layout", "row_bytes", 0, value=1 << 40), "1..", id="huge rows"),
        pytest.param(put("layout", "layers", value=[]), "a list of 1..512", id="no layers"),
        pytest.param(put("layout", "layers", value=[[0] * 4] * 513), "1..512", id="513 layers"),
        pytest.param(put("layout", "layers", 1, value=[4, 2, 8]), "four numbers", id="short layer"),
        pytest.param(put("layout", "layers", 1, 0, value=0), "a ratio", id="ratio 0 with rows"),
        pytest.param(put("layout", "layers", 1, 1, value=0), "a ratio", id="no windows"),
        pytest.param(put("layout", "vocab_size", value=6), "logits has 20", id="other vocabulary"),
        pytest.param(put("model", "identity_sha256", value="AB" * 32), "64 hex", id="not a digest"),
        pytest.param(put("model", "tokenizer_sha256", value=1), "or null", id="tokenizer"),
        pytest.param(put("model", "name", value=None), "name must be a text", id="no name"),
        pytest.param(put("sections", value=[]), "sections must be a list of 10", id="no table"),
        pytest.param(put("sections", 1, 0, value="turns"), "[name, bytes", id="section name"),
        pytest.param(put("sections", 1, 1, value=-1), "must be 0..", id="negative section"),
        pytest.param(put("sections", 1, 1, value=1 << 62), "expected 44", id="huge section"),
        pytest.param(put("sections", 1, 2, value=""), "64 hex digits", id="no checksum"),
        pytest.param(put("sections", 8, 1, value=1 << 30), "at most", id="huge turns"),
        pytest.param(put("sections", 9, 1, value=1 << 30), "at most", id="huge note"),
        pytest.param(put("sections", 9, 1, value=3000), "ends at byte", id="section past the end"),
        pytest.param(put("sections", 9, 1, value=1), "trailing bytes", id="bytes without owner"),
        pytest.param(put("more", value=1), "'more' is unknown", id="unknown member"),
        pytest.param(put("model", "more", value=1), "model.'more' is unknown", id="unknown inside"),
        pytest.param(drop("tokens"), "tokens is missing", id="tokens missing"),
        pytest.param(drop("model", "variant"), "model.variant is missing", id="variant missing"),
    ],
)
def test_header_that_contradicts_itself_is_refused(edit: Edit, message: str) -> None:
    assert message in str(refused(edited(DATA, edit)))


def test_every_member_of_the_header_has_to_be_there() -> None:
    for name in header_of(DATA):
        assert f"{name} is missing" in str(refused(edited(DATA, drop(name))))


def test_claims_beyond_the_file_allocate_nothing() -> None:
    tokens = 1 << 24
    rings = (tokens - 1,) * 3 + (tokens - 4,) * 2 + (tokens,)
    huge = replace(HEADER, tokens=tokens, rings=rings, streams_first=None, checkpoints=())
    sizes = huge.section_bytes() | {"turns": 4, "note": 0}

    def edit(header: dict[str, Any]) -> None:
        header |= {"tokens": tokens, "capacity": tokens, "rings": list(rings)}
        header |= {"checkpoints": [], "streams_first": None}
        for entry in header["sections"]:
            entry[1] = sizes[entry[0]]

    assert sizes["token_ids"] == 64 << 20
    assert "ends at byte" in str(refused(edited(DATA, edit)))
    tracemalloc.start()
    try:
        refused(edited(DATA, edit))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_hostile_header_of_the_largest_size_stays_within_the_bound() -> None:
    text = b'{"a":[' + b"[]," * 349_000 + b"[]]}"
    assert len(text) < 1 << 20
    tracemalloc.start()
    try:
        refused(signed(text, b""))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_turns_are_read_back() -> None:
    data = encode_turns(TURNS)
    assert decode_turns(data, vocab_size=5, path=None, offset=0) == TURNS
    assert decode_turns(encode_turns([]), vocab_size=5, path=None, offset=0) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "4 bytes expected, 0 are left", id="empty"),
        pytest.param(b"\xff" * 4, "turns must be at most 0", id="turns past the end"),
        pytest.param(b"\1\0\0\0" + b"\0" * 13, "at least one piece", id="no piece"),
        pytest.param(b"\1\0\0\0" + b"\xff" * 13, "pieces must be at most", id="pieces past end"),
        pytest.param(
            b"\1\0\0\0\1\0\0\0\2" + b"\0" * 8, "0 (text) or 1 (special), found 2", id="piece kind"
        ),
        pytest.param(
            b"\1\0\0\0\1\0\0\0\0\xff\xff\xff\xff" + b"\0" * 4, "bytes of a piece", id="long piece"
        ),
        pytest.param(
            b"\1\0\0\0\1\0\0\0\0\1\0\0\0\xff" + b"\0" * 4, "not UTF-8", id="text not UTF-8"
        ),
        pytest.param(
            b"\1\0\0\0\1\0\0\0\0" + b"\0" * 4 + b"\2\0\0\0" + b"\0" * 4, "tokens must", id="tokens"
        ),
        pytest.param(
            b"\1\0\0\0\1\0\0\0\0" + b"\0" * 4 + b"\1\0\0\0\5\0\0\0", "ids must be 0..4", id="id V"
        ),
        pytest.param(
            b"\1\0\0\0\1\0\0\0\0" + b"\0" * 4 + b"\1\0\0\0" + b"\xff" * 4, "0..4", id="negative id"
        ),
        pytest.param(b"\0\0\0\0\0", "1 trailing bytes", id="trailing"),
    ],
)
def test_broken_turns_are_refused_with_their_place(data: bytes, message: str) -> None:
    with pytest.raises(SnapshotError, match=r"section turns: .* \(at byte 10\d+\)") as caught:
        decode_turns(data, vocab_size=5, path=None, offset=1000)
    assert message in str(caught.value)


def test_turns_beyond_the_limit_lose_those_used_least_recently() -> None:
    turns = [(((f"turn {i}", False),), (i,) * 300_000) for i in range(5)]
    data = encode_turns(turns)
    assert len(data) <= MAX_TURN_BYTES
    assert decode_turns(data, vocab_size=5, path=None, offset=0) == turns[2:]


class Trickle(io.RawIOBase):
    """A raw file that takes a few bytes at a time, and none after `limit`."""

    def __init__(self, limit: int) -> None:
        self.taken = bytearray()
        self._limit = limit

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if len(self.taken) >= self._limit:
            raise OSError(errno.EIO, "Input/output error")
        self.taken += bytes(data[:7])
        return min(7, len(data))


def blocks(data: bytes = DATA) -> dict[str, list[np.ndarray]]:
    return {name: [np.frombuffer(section_of(data, name), np.uint8)] for name in SECTIONS}


def test_a_file_that_takes_little_at_a_time_gets_everything() -> None:
    file = Trickle(1 << 20)
    write_snapshot(file, HEADER, blocks())  # type: ignore[arg-type]
    assert bytes(file.taken) == DATA


def test_a_failing_write_is_a_storage_error_with_its_number() -> None:
    with pytest.raises(StorageError, match="cannot be written: Input/output error") as caught:
        write_snapshot(Trickle(100), HEADER, blocks())  # type: ignore[arg-type]
    assert caught.value.errno == errno.EIO


def test_a_device_that_is_full_is_told(tmp_path: Path) -> None:
    del tmp_path
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(StorageError, match="No space left on device") as caught,
    ):
        write_snapshot(file, HEADER, blocks())  # type: ignore[arg-type]
    assert caught.value.errno == errno.ENOSPC


def test_failure_of_the_disk_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "talk.dsv4s"
    path.write_bytes(b"old")

    def write(_file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    message = r"talk.dsv4s: cannot be written: No space left on device; a file of that name is as"
    with pytest.raises(StorageError, match=message) as caught:
        save_file(path, write)
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, path)
    assert isinstance(caught.value, OSError)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_names_that_no_file_has_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected the name of a file"):
        inspect_snapshot(name)
    with pytest.raises(ConfigError, match="expected the name of a file"):
        save_file(name, lambda _file: None)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, found in ((".", "a directory"), ("pipe", "a device, pipe or socket")):
        with pytest.raises(SnapshotError, match=f"is {found}, expected a saved session"):
            inspect_snapshot(tmp_path / name)
        with pytest.raises(ConfigError, match=f"expected a file name, found {found}"):
            save_file(tmp_path / name, lambda _file: None)


def test_missing_file_and_missing_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened: No such file") as caught:
        inspect_snapshot(tmp_path / "none.dsv4s")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(StorageError, match="cannot be written: No such file"):
        save_file(tmp_path / "no" / "talk.dsv4s", lambda _file: None)


def test_links_are_followed_and_their_loops_told(tmp_path: Path) -> None:
    target, link, loop = tmp_path / "target", tmp_path / "link", tmp_path / "loop"
    link.symlink_to(target)
    loop.symlink_to(loop)
    save_file(link, lambda file: file.write(DATA))
    assert link.is_symlink()
    assert read_all(link) == read_all(target)
    with pytest.raises(StorageError, match="levels of symbolic links"):
        inspect_snapshot(loop)
    with pytest.raises(ConfigError, match="links that lead in a circle"):
        save_file(loop, lambda file: file.write(DATA))


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "talk.dsv4s"
    path.write_bytes(DATA)
    with open_snapshot(path) as snapshot:
        os.truncate(path, len(DATA) - 1)
        for name in SECTIONS[:-1]:
            snapshot.section(name, Meter(1)).skip()
        with pytest.raises(SnapshotError, match="1 bytes are missing"):
            snapshot.section("note", Meter(1)).skip()


def test_bytes_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        inspect_snapshot(memoryview(DATA)[::2])


def test_header_and_body_make_the_file() -> None:
    assert len(DATA) == PREAMBLE + int.from_bytes(DATA[16:24], "little") + len(body_of(DATA))
    assert with_section(DATA, "turns", section_of(DATA, "turns"))[64:] != b""
