"""How tensors, matrices and runs are passed to the C kernels."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from edgedsv4.errors import BackendUnavailableError, ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.native.library import (
    NativeRun,
    available_on,
    has_native_type,
    library,
    matrix_of,
    new_run,
    pointer,
)
from edgedsv4.kernels.quant_matmul import QuantMatrix

lib, ffi = library()


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def address(tensor: torch.Tensor) -> object:
    return ffi.cast("uint8_t *", tensor.data_ptr())


def test_floats_on_the_cpu_are_for_c() -> None:
    floats = torch.ones(2)
    assert available_on(floats, None) == ("native", "reference")
    assert available_on(floats, floats.double()) == ("reference",)
    assert available_on(floats.bfloat16()) == ("reference",)
    assert available_on(torch.ones(2, device="meta")) == ("reference",)


def test_gradients_are_for_the_reference() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert available_on(weight) == ("reference",)
    with torch.no_grad():
        assert available_on(weight) == ("native", "reference")


def test_a_pointer_is_the_address_and_none_is_null() -> None:
    values = torch.tensor([1.5, 2.5])
    assert pointer(values)[1] == 2.5
    assert pointer(None) == ffi.NULL
    whole = torch.tensor([7])
    assert pointer(whole)[0] == 7
    with pytest.raises(ShapeError, match="contiguous"):
        pointer(torch.ones(2, 2).T)


def test_a_block_matrix_is_described_with_its_rows_and_factor() -> None:
    data = bytes_of(3, 68)
    matrix = matrix_of(QuantMatrix(BLOCK_TYPES["Q8_0"], 3, 64, data, tensor_scale=0.5))
    assert matrix.type == lib.dk_type_id(b"Q8_0")
    assert (matrix.rows, matrix.columns, matrix.row_bytes) == (3, 64, 68)
    assert matrix.data == address(data)
    assert matrix.scale == ffi.NULL
    assert matrix.factor == 0.5


@pytest.mark.parametrize(("name", "shape", "scales", "block"), [
    ("FP8_E4M3", (256, 256), (2, 2), (128, 128)),
    ("FP8_E4M3", (64, 96), (2, 3), (32, 32)),
    ("FP4_E2M1", (2, 32), (2, 2), (1, 32)),
])  # fmt: skip
def test_scale_tensors_are_described_by_block(
    name: str, shape: tuple[int, int], scales: tuple[int, int], block: tuple[int, int]
) -> None:
    data, scale = bytes_of(*shape), bytes_of(*scales)
    columns = shape[1] * (2 if name == "FP4_E2M1" else 1)
    matrix = matrix_of(QuantMatrix(BLOCK_TYPES[name], shape[0], columns, data, scale))
    assert matrix.scale == address(scale)
    assert matrix.scale_stride == scales[1]
    assert (matrix.scale_height, matrix.scale_width) == block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_float_tensor_is_a_matrix(dtype: torch.dtype) -> None:
    whole = torch.ones(4, 10, dtype=dtype)
    matrix = matrix_of(whole[1:, :6])
    assert (matrix.rows, matrix.columns) == (3, 6)
    assert matrix.row_bytes == 10 * dtype.itemsize
    assert matrix.data == address(whole[1:])


def test_a_matrix_of_numbers_is_like_one_of_bytes() -> None:
    numbers = torch.ones(2, 8, dtype=torch.bfloat16)
    matrix = matrix_of(QuantMatrix(BLOCK_TYPES["BF16"], 2, 8, numbers))
    assert (matrix.type, matrix.row_bytes) == (lib.dk_type_id(b"BF16"), 16)


def test_a_matrix_keeps_its_tensor_alive() -> None:
    matrix = matrix_of(torch.full((64, 64), 3.0))
    gc.collect()
    torch.zeros(64, 64)
    assert ffi.cast("float *", matrix.data)[4095] == 3.0


def test_a_matrix_that_c_cannot_read_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="I32"):
        matrix_of(QuantMatrix(BLOCK_TYPES["I32"], 1, 4, bytes_of(1, 16)))
    with pytest.raises(ShapeError, match="side by side"):
        matrix_of(torch.ones(4, 4).T)
    with pytest.raises(BackendUnavailableError, match="meta"):
        matrix_of(torch.ones(4, 4, device="meta"))


def test_known_types_are_told_from_others() -> None:
    assert has_native_type("MXFP4")
    assert not has_native_type("Q8_K")


def test_a_run_says_how_many_threads_may_work() -> None:
    run = new_run(3, is_pinned=True)
    assert (run.cdata.threads, run.cdata.is_pinned, run.cdata.stop) == (3, 1, 0)


def test_the_poll_answers_what_the_caller_wants() -> None:
    run = NativeRun(should_stop=lambda: True)
    assert run.cdata.poll(run.cdata.poll_data) == 1
    run.should_stop = None
    assert run.cdata.poll(run.cdata.poll_data) == 0


MISSING = """
import sys
sys.modules["edgedsv4.kernels.native._kernels"] = None
import torch
from edgedsv4.errors import BackendUnavailableError
from edgedsv4.kernels.native.library import HAVE_NATIVE, WHY_NOT, library
from edgedsv4.kernels.rms_norm import rms_norm
assert not HAVE_NATIVE and "not built" in WHY_NOT
assert rms_norm(torch.ones(1, 4), None, 1e-6).shape == (1, 4)
for call in (library, lambda: rms_norm(torch.ones(1, 4), None, 1e-6, backend="native")):
    try:
        call()
    except BackendUnavailableError as error:
        print(error)
"""


def test_without_the_extension_the_reference_runs_and_the_reason_is_told() -> None:
    command = [sys.executable, "-c", MISSING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, second = done.stdout.splitlines()
    assert "not built" in first
    assert "cannot run here" in second
