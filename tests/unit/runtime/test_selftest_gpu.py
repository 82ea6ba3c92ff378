"""What the self test does with a card: no kernel runs here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_fakes import Machine, nvidia_card

from edgedsv4 import run_selftest
from edgedsv4.runtime import selftest
from edgedsv4.runtime.selftest import gpu
from edgedsv4.runtime.selftest.check import Check
from edgedsv4.runtime.selftest.computing import ways_to_compute
from edgedsv4.runtime.selftest.gpu import gpu_checks

CUDA = torch.device("cuda:0")
OTHERS = ("operation_checks", "matrix_checks", "native_checks", "sampling_checks", "model_checks")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in OTHERS:
        monkeypatch.setattr(selftest, name, lambda *_: ())
    machine = Machine(monkeypatch)
    machine.cuda(nvidia_card())
    return machine


def test_a_card_computes_by_triton_and_by_the_references(machine: Machine) -> None:
    assert [way.name for way in ways_to_compute(CUDA)] == ["triton", "reference"]
    machine.cuda(nvidia_card(7, 0))
    assert [way.name for way in ways_to_compute(CUDA)] == ["reference"]


def test_there_are_no_such_checks_for_a_cpu() -> None:
    assert list(gpu_checks(torch.device("cpu"))) == []


@pytest.mark.usefixtures("machine")
def test_every_check_of_kernels_runs_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    def checks(*given: object) -> Iterator[Check]:
        seen.append(given)
        yield Check(f"check {len(seen)}", lambda _: [], lambda: [], backends=("triton",))

    for name in ("product_checks", "scaled_checks", "row_checks", "step_checks"):
        monkeypatch.setattr(gpu, name, checks)
    names = [result.name for result in run_selftest("cuda")]
    assert names == [f"check {count} (triton)" for count in (1, 2, 3, 4)]
    assert seen == [(CUDA, "sm_90")] * 3 + [(CUDA,)]


def test_a_card_without_kernels_is_announced(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.cuda(nvidia_card(7, 0))
    assert list(run_selftest("cuda")) == []
    assert caplog.messages == [
        "the references alone are checked: its compute capability is 7.0, 8.0 is needed"
    ]
