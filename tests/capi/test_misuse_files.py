"""Saved sessions in bad places, on a full disk, by killed programs; and memory that stays flat."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from capi.programs import HERE, Library, checks_in

FILES = HERE / "misuse_files.c"
KILL = HERE / "misuse_kill.c"
LEAKS = HERE / "misuse_leaks.c"
FLAGS = ("-D_GNU_SOURCE",)
KILLS = 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 512 KiB, None where none can be made."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_places(library: Library, tmp_path: Path, small_disk: Path | None) -> None:
    places = tmp_path / "places"
    places.mkdir()
    found = library.results(FILES, places, *filter(None, [small_disk]), flags=FLAGS)
    expected = {
        name for name in checks_in(FILES) if small_disk is not None or not name.startswith("full.")
    }
    assert {name: found[name] for name in expected} == dict.fromkeys(expected, "ok")
    names = {path.name for path in places.iterdir()}
    assert not [name for name in names if name.endswith(".partial")]


def test_a_killed_program_leaves_the_old_file_or_the_new(library: Library, tmp_path: Path) -> None:
    program = library.program(KILL, *FLAGS)
    moments = random.Random(5)
    for _ in range(KILLS):
        saving = subprocess.Popen([program, tmp_path], stdout=subprocess.PIPE)
        assert saving.stdout is not None
        assert saving.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0, 0.06))
        saving.kill()
        saving.communicate()
        first, second, found = (
            hashlib.sha256((tmp_path / f"{name}.dsv4s").read_bytes()).digest()
            for name in ("first", "second", "talk")
        )
        assert found in {first, second}


def test_memory_is_flat(library: Library) -> None:
    found = library.results(LEAKS, "30", flags=FLAGS)
    names = checks_in(LEAKS)
    assert {name: found[name] for name in names} == dict.fromkeys(names, "ok"), found.facts
