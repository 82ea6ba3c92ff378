"""Calls of host functions by a stream, with a runtime that is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgedsv4.errors import DeviceLostError
from edgedsv4.kernels.gpu import host_calls
from edgedsv4.kernels.gpu.host_calls import HostCalls

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 1 /usr/lib/libc.so.6
7f0000001000-7f0000002000 r-xp 00000000 08:01 2 {path}
7f0000002000-7f0000003000 rw-p 00000000 08:01 2 {path}
7f0000003000-7f0000004000 rw-p 00000000 00:00 0
"""


def test_a_refusal_of_the_runtime_is_an_error() -> None:
    seen: list[tuple[int, ...]] = []

    def launch(*given: int) -> int:
        seen.append(given)
        return 0 if len(seen) == 1 else 719

    calls = HostCalls(launch, "cuLaunchHostFunc")
    calls.launch(1, 2, 3)
    assert seen == [(1, 2, 3)]
    with pytest.raises(DeviceLostError, match="cuLaunchHostFunc failed with status 719"):
        calls.launch(1, 2, 3)


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_only_cuda_and_rocm_have_them(device: str) -> None:
    assert host_calls.host_calls(torch.device(device)) is None


@pytest.mark.parametrize(
    ("hip", "file"), [(None, "libcuda.so.570.1"), ("6.4", "libamdhip64.so.6.4")]
)
def test_the_library_of_the_process_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hip: str | None, file: str
) -> None:
    opened: list[str] = []

    class Library:
        def __init__(self, path: str) -> None:
            opened.append(path)
            self.cuLaunchHostFunc = self.hipLaunchHostFunc = lambda *_given: 0

    maps = tmp_path / "maps"
    maps.write_text(MAPS.format(path=tmp_path / file))
    monkeypatch.setattr(host_calls, "_MAPS", maps)
    monkeypatch.setattr(host_calls.ctypes, "CDLL", Library)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = host_calls.host_calls(torch.device("cuda"))
    assert found is not None
    found.launch(0, 1, 2)
    assert opened == [str(tmp_path / file)]


def test_without_the_library_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr(host_calls, "_MAPS", tmp_path / "none")
    monkeypatch.setattr(host_calls.ctypes, "CDLL", refuse)
    assert host_calls.host_calls(torch.device("cuda")) is None
