"""A build that is ended in any way costs at most one layer, and the pack comes out the same."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from pack_models import CONFIG, mixed_types, write_model, write_official, write_pack

from edgedsv4.errors import BusyError, CancelledError, CapacityError, ConfigError, FormatError
from edgedsv4.formats import expert_pack_write
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.formats.expert_pack_index import ENTRY
from edgedsv4.formats.expert_pack_manifest import manifest_path
from edgedsv4.runtime import pack_build
from edgedsv4.runtime.pack_build import build_pack
from edgedsv4.runtime.pack_options import PackOptions
from edgedsv4.runtime.shipped_models import open_model

# Kills itself at call number N of the progress function, or of a function of the module `os`.
CHILD = """
import os, signal, sys
from pathlib import Path
from edgedsv4.runtime.pack_build import build_pack
from edgedsv4.runtime.pack_options import PackOptions
count = int(sys.argv[3])
def die(*args):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "progress":
    watch = die
else:
    watch = None
    kept = getattr(Path, sys.argv[4])
    def dying(*args, **words):
        die()
        return kept(*args, **words)
    setattr(Path, sys.argv[4], dying)
options = PackOptions(safety_margin_bytes=0, resume=True)
build_pack(sys.argv[1], Path(sys.argv[2]), options, on_progress=watch)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The pack of an undisturbed build."""
    path = tmp_path_factory.mktemp("whole") / "x"
    write_pack(model, path)
    return path.read_bytes()


def stop_after(calls: int) -> Any:
    left = iter(range(calls))
    return lambda: next(left, None) is None


def cancelled(model: Path, target: Path, calls: int, **changes: Any) -> None:
    options = PackOptions(safety_margin_bytes=0, **changes)
    with pytest.raises(CancelledError, match="--resume"):
        build_pack(model, target, options, should_stop=stop_after(calls))


def hashing_calls(model: Path) -> int:
    """Pieces in which the source is hashed."""
    calls = 0

    def count(what: str, _done: int, _total: int) -> None:
        nonlocal calls
        calls += what == "hashing the source"

    options = PackOptions(safety_margin_bytes=0)
    build_pack(model, model.with_name("count.pack"), options, on_progress=count)
    return calls


def test_progress_grows_to_its_total_in_each_step(model: Path, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    build_pack(
        model,
        tmp_path / "x",
        PackOptions(safety_margin_bytes=0),
        on_progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )
    assert list(seen) == ["hashing the source", "writing experts", "checking the pack"]
    for steps in seen.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_cancelled_build_goes_on_behind_its_last_layer(
    model: Path, whole: bytes, tmp_path: Path, layers: int
) -> None:
    per_layer = 3 * CONFIG.num_experts
    cancelled(model, tmp_path / "x", hashing_calls(model) + layers * per_layer + 5)
    assert not (tmp_path / "x").exists()
    report = write_pack(model, tmp_path / "x", resume=True)
    assert report.resumed_layers == layers
    assert (tmp_path / "x").read_bytes() == whole
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["x", "x.inventory.jsonl", "x.manifest.json"]


def test_checkpoint_has_the_form_of_sglang(model: Path, whole: bytes, tmp_path: Path) -> None:
    cancelled(model, tmp_path / "x", hashing_calls(model) + 2 * 3 * CONFIG.num_experts + 1)
    text = (tmp_path / "x.checkpoint.json").read_text(encoding="utf-8")
    values = json.loads(text)
    assert text == json.dumps(values, indent=2, sort_keys=True) + "\n"
    assert values["format"] == "SGLANG-EXPERTPACK-v1-checkpoint"
    assert (values["version"], values["status"]) == (1, "in_progress")
    assert values["completed_layers"] == [0, 1]
    assert values["expected_pack_bytes"] == len(whole)
    assert len(values["entries"]) == 2 * 3 * CONFIG.num_experts
    stored = np.frombuffer(whole[176 : 176 + 328 * len(values["entries"])], dtype=ENTRY)
    for record, entry in zip(values["entries"], stored, strict=True):
        assert record["pack_offset"] == entry["pack_offset"]
        assert record["checksum"] == entry["checksum"].tobytes().hex()
        assert record["dtype"] == "MXFP4"
        assert record["shape"] == entry["shape"].tolist()
    header = (tmp_path / "x.partial").read_bytes()[:176]
    assert header == whole[:176]


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        *((calls, "progress") for calls in (3, 110, 140, 172)),
        *((calls, "replace") for calls in (0, 1, 3, 5, 7)),
        (0, "unlink"),
    ],
)
def test_killed_build_goes_on(
    model: Path, whole: bytes, tmp_path: Path, calls: int, what: str
) -> None:
    target = tmp_path / "x"
    arguments = [sys.executable, "-c", CHILD, str(model), str(target), str(calls), what]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if target.exists():
        assert target.read_bytes() == whole  # a name is only given to what is complete
    write_pack(model, target, resume=True)
    assert target.read_bytes() == whole
    with open_model(target) as checkpoint:
        assert checkpoint.warnings == ()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"x", "x.inventory.jsonl", "x.manifest.json"}


def test_build_killed_between_name_and_manifest_is_unfinished_until_it_goes_on(
    model: Path, whole: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "x"
    # Renames: inventory, checkpoint at the start, one per layer, checkpoint at the end, the pack.
    calls = 2 + CONFIG.num_layers + 2
    arguments = [sys.executable, "-c", CHILD, str(model), str(target), str(calls), "replace"]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    assert target.read_bytes() == whole
    assert not manifest_path(target).exists()
    with pytest.raises(FormatError, match="unfinished"), open_model(target):
        pass
    assert write_pack(model, target, resume=True).resumed_layers == CONFIG.num_layers
    with open_model(target) as checkpoint:
        assert checkpoint.warnings == ()


def test_version_2_goes_on_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", mixed_types)
    table = tmp_path / "freq.json"
    table.write_text(json.dumps({"tokens": 3, "counts": [[1] * 8] * 3}))
    write_pack(model, tmp_path / "a", frequency=table)
    calls = hashing_calls(model) + 30
    cancelled(model, tmp_path / "b", calls, frequency=table)
    report = write_pack(model, tmp_path / "b", resume=True, frequency=table)
    assert report.resumed_layers == 1
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_official_source_with_a_companion_goes_on_too(tmp_path: Path) -> None:
    official = write_official(tmp_path / "official")
    write_pack(official, tmp_path / "a", dense_out=tmp_path / "a.gguf")
    options = {"dense_out": tmp_path / "b.gguf"}
    with pytest.raises(CancelledError):
        build_pack(
            official,
            tmp_path / "b",
            PackOptions(safety_margin_bytes=0, dense_out=tmp_path / "b.gguf"),
            should_stop=lambda: (
                (tmp_path / "b.checkpoint.json").exists()
                and len(json.loads((tmp_path / "b.checkpoint.json").read_text())["entries"]) > 0
            ),
        )
    assert write_pack(official, tmp_path / "b", resume=True, **options).resumed_layers == 1
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_stale_companion_is_not_taken_for_that_of_the_source(tmp_path: Path) -> None:
    official = write_official(tmp_path / "official")
    write_pack(official, tmp_path / "a", dense_out=tmp_path / "a.gguf")
    stale = tmp_path / "b.gguf"
    write_pack(write_official(tmp_path / "other", seed=6), tmp_path / "o", dense_out=stale)
    write_pack(official, tmp_path / "b", resume=True, dense_out=stale)
    assert stale.read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_companion_that_changed_ends_a_build_that_goes_on(tmp_path: Path) -> None:
    official = write_official(tmp_path / "official")
    dense, checkpoint = tmp_path / "b.gguf", tmp_path / "b.checkpoint.json"
    with pytest.raises(CancelledError):
        build_pack(
            official,
            tmp_path / "b",
            PackOptions(safety_margin_bytes=0, dense_out=dense),
            should_stop=lambda: checkpoint.exists() and '"layer": 0' in checkpoint.read_text(),
        )
    content = bytearray(dense.read_bytes())
    content[-1] ^= 1
    dense.write_bytes(content)
    with pytest.raises(FormatError, match="belongs to another build"):
        write_pack(official, tmp_path / "b", resume=True, dense_out=dense)


def test_resume_without_an_unfinished_build_starts_one(
    model: Path, whole: bytes, tmp_path: Path
) -> None:
    assert write_pack(model, tmp_path / "x", resume=True).resumed_layers == 0
    assert (tmp_path / "x").read_bytes() == whole


# ---- what must not go on


@pytest.fixture
def unfinished(model: Path, tmp_path: Path) -> Path:
    """A build with one finished layer."""
    cancelled(model, tmp_path / "x", hashing_calls(model) + 3 * CONFIG.num_experts + 3)
    return tmp_path / "x"


def test_unfinished_build_is_not_thrown_away_unasked(model: Path, unfinished: Path) -> None:
    with pytest.raises(ConfigError, match=r"unfinished build.*resume"):
        write_pack(model, unfinished)
    assert unfinished.with_name("x.partial").exists()


def test_build_of_another_source_does_not_go_on(unfinished: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", seed=6)
    unfinished.with_name("x.inventory.jsonl").unlink()
    with pytest.raises(FormatError, match="belongs to another build") as caught:
        write_pack(other, unfinished, resume=True)
    assert caught.value.fault == "mismatch"


def test_inventory_of_another_source_is_refused(unfinished: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", seed=6)
    with pytest.raises(FormatError, match="no inventory of"):
        write_pack(other, unfinished, resume=True)


def test_source_that_changed_under_its_inventory_is_noticed(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m.gguf"
    copy.write_bytes(model.read_bytes())
    cancelled(copy, tmp_path / "x", hashing_calls(model) + 3 * CONFIG.num_experts + 3)
    copy.write_bytes(write_model(tmp_path / "other.gguf", seed=6).read_bytes())
    with pytest.raises(FormatError, match="the source changed since") as caught:
        write_pack(copy, tmp_path / "x", resume=True)
    assert caught.value.fault == "checksum"
    assert not (tmp_path / "x").exists()


def test_build_of_another_program_does_not_go_on(
    model: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_build, "_tool_sha256", lambda: "0" * 64)
    with pytest.raises(FormatError, match="tool_sha256"):
        write_pack(model, unfinished, resume=True)


@pytest.mark.parametrize("how", ["shortened", "other header", "other payload"])
def test_unfinished_file_that_changed_is_refused(model: Path, unfinished: Path, how: str) -> None:
    partial = unfinished.with_name("x.partial")
    content = bytearray(partial.read_bytes())
    if how == "shortened":
        content = content[:3000]
    else:
        content[100 if how == "other header" else -20_000] ^= 1
    if how == "other payload":
        with partial.open("r+b") as file:
            values = json.loads(unfinished.with_name("x.checkpoint.json").read_text())
            file.seek(values["entries"][4]["pack_offset"])
            file.write(b"\x55" * 40)
    else:
        partial.write_bytes(content)
    with pytest.raises(FormatError, match="delete"):
        write_pack(model, unfinished, resume=True)
    assert not unfinished.exists()


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text[: len(text) // 2],
        lambda text: f"[{text}]",
        lambda text: text.replace('"completed_layers": [\n    0\n  ]', '"completed_layers": [1]'),
        lambda text: text.replace('"pack_end": ', '"pack_end": 1'),
        lambda text: text.replace('"in_progress"', '"done"'),
        lambda text: text.replace('"MXFP4"', '"A name that does not fit into 16 bytes"', 1),
        lambda text: text.replace('"layer": 0', '"layer": -1', 1),
        lambda text: text.replace('"layer": 0', '"layer": 99999', 1),
        lambda text: text.replace('"layer": 0', '"layer": "zero"', 1),
        lambda text: text.replace('"layer": 0', '"layers": 0', 1),
    ],
)
def test_damaged_checkpoint_is_refused(model: Path, unfinished: Path, edit: Any) -> None:
    checkpoint = unfinished.with_name("x.checkpoint.json")
    text = checkpoint.read_text(encoding="utf-8")
    assert edit(text) != text
    checkpoint.write_text(edit(text), encoding="utf-8")
    with pytest.raises(FormatError):
        write_pack(model, unfinished, resume=True)


def test_second_process_does_not_write_the_same_pack(model: Path, unfinished: Path) -> None:
    with unfinished.with_name("x.partial").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process"):
            write_pack(model, unfinished, resume=True)


# ---- disks


def test_disk_without_room_for_pack_and_margin_is_refused_at_once(
    model: Path, whole: bytes, tmp_path: Path
) -> None:
    with pytest.raises(CapacityError, match="not enough free space") as caught:
        build_pack(model, tmp_path / "x", PackOptions(safety_margin_bytes=1 << 50))
    assert caught.value.needed_bytes == (1 << 50) + len(whole)
    assert list(tmp_path.iterdir()) == []


def test_rest_of_an_unfinished_build_is_all_that_must_fit(
    model: Path, whole: bytes, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads(unfinished.with_name("x.checkpoint.json").read_text())
    with read_expert_pack_of(whole, unfinished.with_name("w")) as pack:
        rest = values["expected_pack_bytes"] - values["pack_end"] + pack.layout.data_start

    class Usage:
        free = rest - 1

    monkeypatch.setattr(expert_pack_write.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(CapacityError) as caught:
        write_pack(model, unfinished, resume=True)
    assert caught.value.needed_bytes == rest
    Usage.free = rest
    write_pack(model, unfinished, resume=True)


class FullDisk:
    """A file on a disk that is full after so many bytes."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: Any) -> int:
        self.room -= len(memoryview(data).cast("B"))
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def limit(room: int) -> None:
        kept = os.fdopen
        monkeypatch.setattr(
            expert_pack_write.os, "fdopen", lambda *args: FullDisk(kept(*args), room)
        )

    yield limit
    monkeypatch.undo()


def test_full_disk_keeps_the_finished_layers(
    model: Path, whole: bytes, tmp_path: Path, full_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_after(len(whole) * 3 // 4)
    with pytest.raises(CapacityError, match=r"full after [12] layers, which are kept.*--resume"):
        write_pack(model, tmp_path / "x")
    monkeypatch.undo()
    assert not (tmp_path / "x").exists()
    assert write_pack(model, tmp_path / "x", resume=True).resumed_layers > 0
    assert (tmp_path / "x").read_bytes() == whole


def test_disk_that_is_full_before_the_first_layer_leaves_nothing(
    model: Path, tmp_path: Path, full_after: Any
) -> None:
    full_after(4000)
    with pytest.raises(CapacityError, match="full after 0 layers"):
        write_pack(model, tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"x.inventory.jsonl"}


def test_disk_that_is_full_for_the_index_is_told(
    model: Path, whole: bytes, tmp_path: Path, full_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with read_expert_pack_of(whole, tmp_path / "w") as pack:
        experts = pack.layout.data_end - pack.layout.data_start
    full_after(176 + experts + 100)
    with pytest.raises(CapacityError, match="full after 3 layers"):
        write_pack(model, tmp_path / "x")
    monkeypatch.undo()
    write_pack(model, tmp_path / "x", resume=True)
    assert (tmp_path / "x").read_bytes() == whole


def read_expert_pack_of(content: bytes, path: Path) -> Any:
    path.write_bytes(content)
    return read_expert_pack(path)


def test_older_pack_is_as_it_was_when_a_build_fails(
    model: Path, tmp_path: Path, full_after: Any
) -> None:
    target = tmp_path / "x"
    write_pack(write_model(tmp_path / "old.gguf", seed=8), target)
    before = target.read_bytes(), manifest_path(target).read_bytes()
    full_after(50_000)
    with pytest.raises(CapacityError):
        write_pack(model, target)
    assert (target.read_bytes(), manifest_path(target).read_bytes()) == before
