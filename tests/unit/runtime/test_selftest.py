"""The self test: that it passes here, and that what is wrong shows where it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgedsv4 import SelfTestResult, run_selftest
from edgedsv4.errors import BackendUnavailableError, BusyError
from edgedsv4.kernels import rms_norm, sample
from edgedsv4.kernels.native.library import instruction_sets, library
from edgedsv4.runtime import selftest
from edgedsv4.runtime.selftest import computing, operations, shipped
from edgedsv4.runtime.shipped_models import model_path

lib, _ = library()
NATIVE = [f"native {found.name}" for found in instruction_sets()]
OPERATIONS = ("operation_checks", "matrix_checks", "native_checks", "sampling_checks")

Norm = Callable[[Tensor, Tensor | None, float], Tensor]


@pytest.fixture
def only_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the models out, which take most of the time."""
    monkeypatch.setattr(selftest, "model_checks", lambda _device: ())


@pytest.fixture
def only_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPERATIONS:
        monkeypatch.setattr(selftest, name, lambda *_: ())


@pytest.fixture
def level() -> Iterator[int]:
    """A level that is not the best one, so that it shows whether it comes back."""
    before = lib.dk_isa()
    assert lib.dk_set_isa(0) == 0
    yield 0
    lib.dk_set_isa(before)


def replace_norm(monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
    monkeypatch.setattr(rms_norm, "_rms_norm_native", norm)


def failed(results: list[SelfTestResult]) -> dict[str, str]:
    return {result.name: result.detail for result in results if not result.has_passed}


def rows_of(check: str) -> list[str]:
    return [f"{check} ({name})" for name in NATIVE]


def test_this_machine_passes_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    results = list(run_selftest("cpu"))
    assert not failed(results)
    assert [result.index for result in results] == list(range(len(results)))
    assert {result.total for result in results} == {len(results)}
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("only_operations")
def test_each_instruction_set_and_the_reference_run_every_operation() -> None:
    names = [result.name for result in run_selftest()]
    assert len(set(names)) == len(names)
    for operation in ("rms_norm", "router", "expert_ffn", "sparse_attention", "weights: Q4_K"):
        assert {f"{operation} ({way})" for way in (*NATIVE, "reference")} <= set(names)


@pytest.mark.usefixtures("only_operations")
def test_without_c_kernels_the_references_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "HAVE_NATIVE", False)
    results = list(run_selftest())
    assert not failed(results)
    assert all(result.name.endswith(" (reference)") for result in results)


def test_missing_c_kernels_are_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selftest, "WHY_NOT", "no compiler")
    run_selftest()
    assert caplog.messages == ["the references alone are checked: no compiler"]


@pytest.mark.usefixtures("only_operations")
def test_wrong_kernel_fails_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rms_norm._rms_norm_native
    replace_norm(monkeypatch, lambda x, weight, eps: right(x, weight, eps) * 1.0001)
    found = failed(list(run_selftest()))
    assert list(found) == rows_of("rms_norm")
    assert found["rms_norm (native scalar)"].startswith("error 0.0001, limit 1e-05")


@pytest.mark.usefixtures("only_operations")
@pytest.mark.parametrize("name", NATIVE)
def test_kernel_wrong_with_one_instruction_set_fails_that_row(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right, wrong = rms_norm._rms_norm_native, instruction_sets()[NATIVE.index(name)].level

    def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y = right(x, weight, eps)
        y[-1, -1] += 0.01 * (lib.dk_isa() == wrong)
        return y

    replace_norm(monkeypatch, norm)
    assert list(failed(list(run_selftest()))) == [f"rms_norm ({name})"]


@pytest.mark.usefixtures("only_operations")
def test_element_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_norm(monkeypatch, lambda x, _weight, _eps: torch.empty_like(x))
    results = list(run_selftest())
    assert list(failed(results)) == rows_of("rms_norm")
    bad = next(result for result in results if not result.has_passed)
    assert "not finite" in bad.detail
    assert bad.error is None


@pytest.mark.usefixtures("only_operations")
def test_wrong_reference_fails_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operations.swiglu

    def swiglu(gate: Tensor, up: Tensor, limit: float, *, backend: str) -> Tensor:
        y = right(gate, up, limit, backend=backend)
        return y * 1.001 if (backend, y.dtype) == ("reference", torch.float32) else y

    monkeypatch.setattr(operations, "swiglu", swiglu)
    assert list(failed(list(run_selftest()))) == ["swiglu (reference)"]


@pytest.mark.usefixtures("only_operations")
def test_wrong_choice_of_a_token_fails_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sample._sample_native
    monkeypatch.setattr(sample, "_sample_native", lambda *given: max(0, right(*given) - 1))
    assert list(failed(list(run_selftest()))) == rows_of("sample")


@pytest.mark.usefixtures("only_operations")
def test_kernel_that_raises_is_a_failed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(_x: Tensor, _weight: Tensor | None, _eps: float) -> Tensor:
        raise ValueError("out of\norder")

    replace_norm(monkeypatch, norm)
    results = list(run_selftest())
    assert set(failed(results).values()) == {"ValueError: out of order"}
    assert len(results) == results[0].total


@pytest.mark.usefixtures("only_models")
def test_wrong_golden_token_fails_the_rows_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with model_path("pocket-v4") as path:
        stored = json.loads(shipped.golden_file(path).read_text())
    stored["cases"][1]["token_ids"][-1] += 1
    (tmp_path / "golden.json").write_text(json.dumps(stored))
    monkeypatch.setattr(shipped, "golden_file", lambda _path: tmp_path / "golden.json")
    results = list(run_selftest())
    assert [r.name for r in results if not r.has_passed] == [
        r.name for r in results if "golden" in r.name
    ]
    assert {r.error for r in results if not r.has_passed} == {1.0}


@pytest.mark.usefixtures("only_models")
def test_missing_golden_file_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped, "golden_file", lambda _path: tmp_path / "golden.json")
    found = failed(list(run_selftest()))
    assert all("golden" in name and "FileNotFoundError" in found[name] for name in found)
    assert found


@pytest.mark.usefixtures("only_operations")
def test_settings_are_the_same_between_results_and_afterwards(level: int) -> None:
    before = (torch.get_deterministic_debug_mode(), torch.get_num_threads())
    for _ in run_selftest():
        assert lib.dk_isa() == level
        assert (torch.get_deterministic_debug_mode(), torch.get_num_threads()) == before


@pytest.mark.usefixtures("only_operations")
def test_interrupt_ends_it_and_leaves_the_settings(
    monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    def norm(_x: Tensor, _weight: Tensor | None, _eps: float) -> Tensor:
        raise KeyboardInterrupt

    replace_norm(monkeypatch, norm)
    with pytest.raises(KeyboardInterrupt):
        list(run_selftest())
    assert lib.dk_isa() == level
    with pytest.raises(KeyboardInterrupt):  # and not BusyError
        list(run_selftest())


@pytest.mark.usefixtures("only_operations")
def test_second_self_test_is_refused_until_the_first_ends() -> None:
    first = run_selftest()
    assert next(first).has_passed
    with pytest.raises(BusyError, match="another self test"):
        run_selftest()
    first.close()  # type: ignore[attr-defined]  # a generator
    assert next(run_selftest()).has_passed


@pytest.mark.usefixtures("only_operations")
def test_dropped_iterator_holds_nobody_up() -> None:
    dropped = run_selftest()
    next(dropped)
    del dropped
    assert next(run_selftest()).has_passed


def test_unknown_device_is_refused_at_once() -> None:
    with pytest.raises(BackendUnavailableError, match="tpu"):
        run_selftest("tpu")
