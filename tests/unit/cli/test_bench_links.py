"""`edgedsv4 bench links`: options, table and the file that keeps figures; all are samples."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from link_samples import CARD, DRIVE, links

import edgedsv4
from edgedsv4.cli import main
from edgedsv4.errors import StorageError
from edgedsv4.runtime.links import Links, MachineFacts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "edgedsv4" / "links.json"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[Any]:
    """Options that the command hands on."""
    assert not cache.exists()
    found: list[Any] = []

    def measure(options: Any, on_progress: Any) -> Links:
        found.append(options)
        on_progress("memory", 0, 1)
        return links()

    monkeypatch.setattr(edgedsv4, "measure_links", measure, raising=False)
    return found


def test_options_are_those_of_the_record_unless_given(asked: list[Any]) -> None:
    assert main(["bench", "links"]) == 0
    assert asked == [edgedsv4.LinkOptions()]


def test_given_options_are_handed_on(asked: list[Any]) -> None:
    options = ["--path", "/data", "--types", "mxfp4, Q4_K", "--repeat", "5", "--threads", "3"]
    assert main(["bench", "links", *options, "--device", "cuda:1"]) == 0
    assert asked == [
        edgedsv4.LinkOptions(
            path=Path("/data"),
            types=("MXFP4", "Q4_K"),
            repeat=5,
            threads=3,
            device="cuda:1",
        )
    ]


@pytest.mark.usefixtures("asked")
def test_table_holds_medians_and_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "links"]) == 0
    found = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert found == [
        "machine Processor, cores: 8",
        "instructions avx512",
        "memory reads 1 thread 30.00 GB/s",
        "memory reads 8 threads 70.00 GB/s",
        "card cuda:0, Card",
        "from pinned memory 52.00 GB/s",
        "into pinned memory 50.00 GB/s",
        "copies 1,300.00 GB/s",
        "reads 1,400.00 GB/s",
        "products 200.0 TFLOP/s",
        "exchange 45.0 us",
        "both at once MXFP4 experts 40.00 GB/s, copies 25.00 GB/s",
        "drive /, direct reads",
        "1,024 KiB x 1 3.00 GB/s",
        "1,024 KiB x 16 12.00 GB/s",
        "4,096 KiB x 16 12.00 GB/s",
        "",
        "experts on the CPU threads tokens Gweights/s GB/s Gproducts/s bound by",
        "MXFP4 1 1 20.00 10.00 20.0 the kernel (33% of memory)",
        "MXFP4 8 4 100.00 50.00 400.0 memory",
        "MXFP4 8 1 120.00 60.00 120.0 memory",
        "MXFP4 8 16 50.00 25.00 800.0 the kernel (36% of memory)",
        "MXFP4: copied to the card faster than computed by the CPU from 4 tokens per expert on",
        "left out: no drive was named (path)",
    ]


@pytest.mark.usefixtures("asked")
def test_json_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "links", "--json"]) == 0
    assert Links.from_json(json.loads(capsys.readouterr().out)) == links()


@pytest.mark.usefixtures("asked")
def test_figures_are_kept_and_the_place_is_told(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bench", "links"])
    assert Links.read(cache) == links()
    assert str(cache) in capsys.readouterr().err


@pytest.mark.usefixtures("asked")
def test_drives_of_the_same_machine_stay(cache: Path) -> None:
    cache.parent.mkdir()
    other = dataclasses.replace(DRIVE, mount="/data")
    links(drives=(other,)).write(cache)
    main(["bench", "links"])
    assert Links.read(cache).drives == (DRIVE, other)


@pytest.mark.usefixtures("asked")
def test_figures_of_another_machine_are_replaced(cache: Path) -> None:
    cache.parent.mkdir()
    other = dataclasses.replace(links().machine, cores=99)
    links(drives=(dataclasses.replace(DRIVE, mount="/data"),), machine=other).write(cache)
    main(["bench", "links"])
    assert Links.read(cache) == links()


@pytest.mark.usefixtures("asked")
def test_figures_that_cannot_be_kept_are_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "edgedsv4").write_text("a file where the folder should be")
    assert main(["bench", "links"]) == 0
    found = capsys.readouterr()
    assert "memory reads" in found.out
    assert "could not be kept" in found.err


def test_relative_cache_home_does_not_count(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    main(["bench", "links"])
    assert asked
    assert (tmp_path / ".cache" / "edgedsv4" / "links.json").exists()


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["links", "--prompt", "5"], "--prompt"),
        (["links", "--ctx", "5"], "--ctx"),
        (["links", "--layers", "5"], "--layers"),
        (["links", "--synthetic", "flash"], "--synthetic"),
        (["random-tiny", "--path", "/"], "--path"),
        (["random-tiny", "--types", "Q4_K"], "--types"),
        (["--synthetic", "flash", "--path", "/"], "--path"),
        (["links", "--repeat", "0"], "repeat"),
        (["links", "--types", "Q9"], "Q9"),
        (["links", "--path", "/absent/file"], "/absent/file"),
    ],
    ids=str,
)
def test_wrong_use_is_told_in_one_line(
    arguments: list[str], culprit: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert culprit in err
    assert err.count("\n") == 1
    assert not cache.exists()


def test_drive_that_cannot_be_measured_is_a_failure(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_options: Any, on_progress: Any) -> Links:
        assert on_progress is not None
        raise StorageError("only 0 of 5 bytes came from a drive", path="/dev/shm")

    monkeypatch.setattr(edgedsv4, "measure_links", measure, raising=False)
    assert main(["bench", "links", "--path", "/dev/shm"]) == 1
    assert "only 0 of 5 bytes" in capsys.readouterr().err
    assert not cache.exists()


def test_card_without_reads_has_no_line_of_them(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = links(card=dataclasses.replace(CARD, read=()), overlap=None, machine=MachineFacts.of())
    monkeypatch.setattr(edgedsv4, "measure_links", lambda *_a, **_k: found, raising=False)
    assert main(["bench", "links"]) == 0
    out = capsys.readouterr().out
    assert " reads " not in out.replace("memory reads", "").replace("direct reads", "")
    assert cache.exists()
