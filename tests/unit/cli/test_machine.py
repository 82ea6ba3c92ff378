"""`edgedsv4 selftest` and `edgedsv4 devices`: tables, documents and exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import edgedsv4
from edgedsv4 import DeviceInfo, SelfTestResult
from edgedsv4.cli import main

PASSED = SelfTestResult("norm (scalar)", True, "error 1e-07, limit 1e-05", 0, 2, 0.5, 1e-7, 1e-5)
WRONG = SelfTestResult("norm (avx2)", False, "ValueError: no", 1, 2, 0.25, None, 1e-5)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[SelfTestResult]:
    """What the self test finds."""
    found: list[SelfTestResult] = [PASSED]

    def run(device: str) -> Iterator[SelfTestResult]:
        assert device == "auto"
        yield from found

    monkeypatch.setattr(edgedsv4, "run_selftest", run)
    return found


@pytest.mark.usefixtures("results")
def test_checks_that_pass_end_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest"]) == 0
    head, row, _, summary = capsys.readouterr().out.splitlines()
    assert head.split() == ["check", "result", "error", "limit", "seconds"]
    assert row.split() == ["norm", "(scalar)", "ok", "1e-07", "1e-05", "0.500"]
    assert summary.startswith("1 of 1 checks passed in ")


def test_failed_check_is_told_with_its_reason(
    results: list[SelfTestResult], capsys: pytest.CaptureFixture[str]
) -> None:
    results.append(WRONG)
    assert main(["selftest"]) == 1
    *_, failure, summary = capsys.readouterr().out.splitlines()
    assert failure == "FAILED norm (avx2): ValueError: no"
    assert summary.startswith("1 of 2 checks passed in ")


def test_json_holds_every_result(
    results: list[SelfTestResult], capsys: pytest.CaptureFixture[str]
) -> None:
    results.append(WRONG)
    assert main(["selftest", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["has_passed"]) == ("auto", False)
    assert [result["name"] for result in found["results"]] == [PASSED.name, WRONG.name]
    assert found["results"][1]["error"] is None


def test_interrupt_ends_with_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_device: str) -> Iterator[SelfTestResult]:
        yield PASSED
        raise KeyboardInterrupt

    monkeypatch.setattr(edgedsv4, "run_selftest", run)
    assert main(["selftest"]) == 130
    assert "ok" in capsys.readouterr().out


def test_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "tpu"]) == 2
    assert "tpu" in capsys.readouterr().err


def test_devices_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = DeviceInfo("cpu", "cpu", "Chip", 3 << 29, True, "avx2", 1)
    card = DeviceInfo("cuda:0", "cuda", "Card", 8 << 30, False, None, None, "sm_90")
    old = DeviceInfo("cuda:1", "cuda", "Old", 8 << 30, False, None, None, "sm_70", "it is old")
    monkeypatch.setattr(edgedsv4, "devices", lambda: (cpu, card, old))
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cpu       Chip, 1.5 GiB, avx2, 1 thread, the default",
        "cuda:0    Card, 8.0 GiB, sm_90",
        "cuda:1    Old, 8.0 GiB, sm_70, no kernels: it is old",
    ]


def test_devices_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [device["name"] for device in found] == [d.name for d in edgedsv4.devices()]
