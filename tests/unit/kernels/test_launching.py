"""Launches that find their compiled kernel again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from edgedsv4.kernels.gpu import launching
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two


@dataclass(frozen=True)
class Parameter:
    name: str
    is_constexpr: bool


@dataclass(eq=False)
class Kernel:
    """Stands where a jitted function would; keeps what was compiled and what was called."""

    compiled: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )
    called: list[tuple[tuple[int, ...], tuple[Any, ...]]] = field(default_factory=list)
    params: tuple[Parameter, ...] = (
        Parameter("x_ptr", is_constexpr=False),
        Parameter("n", is_constexpr=False),
        Parameter("BLOCK", is_constexpr=True),
    )
    is_recorded: bool = False

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*arguments: Any, **named: Any) -> Any:
            self.compiled.append((grid, arguments, named))
            return None if self.is_recorded else Compiled(self)

        return compile_and_run


@dataclass(eq=False)
class Compiled:
    kernel: Kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.kernel.called.append((grid, values))


@dataclass(frozen=True)
class OnCard:
    """A tensor's part in the key, on a card that is not here."""

    index: int = 0
    is_cuda: bool = True

    def get_device(self) -> int:
        return self.index


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launching, "IS_INTERPRETED", False)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.version, "hip", None)
    return Kernel()


def test_the_second_launch_goes_straight_to_the_compiled_kernel(kernel: Kernel) -> None:
    x = OnCard()
    launch(kernel, (3, 2), x, 7, BLOCK=64, num_warps=4)
    assert kernel.compiled == [((3, 2), (x, 7), {"BLOCK": 64, "num_warps": 4})]
    launch(kernel, (5,), x, 9, BLOCK=64, num_warps=4)
    launch(kernel, (5,), n=9, x_ptr=x, BLOCK=64, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.called == [((5, 1, 1), (x, 9, 64))] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"n": 7}, {"n": 1}),
        ({"n": 7}, {"n": 16}),
        ({"n": 7}, {"n": (1 << 31) + 7}),
        ({"n": 7}, {"n": 7.0}),
        ({"n": 7}, {"n": None}),
        ({"BLOCK": 64}, {"BLOCK": 128}),
        ({"num_warps": 4}, {"num_warps": 8}),
        ({"x_ptr": OnCard()}, {"x_ptr": OnCard(1)}),
    ],
)
def test_what_triton_tells_apart_is_compiled_apart(
    kernel: Kernel, first: dict[str, Any], second: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {"x_ptr": OnCard(), "n": 7, "BLOCK": 64, "num_warps": 4}
    launch(kernel, (1,), **{**usual, **first})
    launch(kernel, (1,), **{**usual, **second})
    assert len(kernel.compiled) == 2


def test_tensors_differ_by_type_and_alignment() -> None:
    words = torch.zeros(64, dtype=torch.int32)
    specialized = launching._specialized
    assert specialized(words) == specialized(words[4:])
    assert specialized(words) != specialized(words[1:])
    assert specialized(words) != specialized(words.view(torch.float32))


def test_a_launch_that_is_only_recorded_is_not_kept(kernel: Kernel) -> None:
    kernel.is_recorded = True
    for _ in range(2):
        launch(kernel, (1,), OnCard(), 7, BLOCK=64)
    assert len(kernel.compiled) == 2


def test_elsewhere_every_launch_is_triton_s(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        launch(kernel, (1,), OnCard(is_cuda=False), 7, BLOCK=64)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launch(kernel, (1,), OnCard(), 7, BLOCK=64)
    monkeypatch.setattr(torch.version, "hip", None)
    launch(kernel, (1,), OnCard(), 7)  # BLOCK has a default value
    assert len(kernel.compiled) == 4
    assert not kernel.called


def test_sizes() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
