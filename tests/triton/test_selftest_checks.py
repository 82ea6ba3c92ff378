"""The checks of the self test that a user runs on a card."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, has_scaled_products

from edgedsv4.kernels.gpu.expert_scaled import triton_release
from edgedsv4.runtime.selftest.check import Check, judge
from edgedsv4.runtime.selftest.computing import Computing
from edgedsv4.runtime.selftest.gpu_products import product_checks, scaled_checks
from edgedsv4.runtime.selftest.gpu_rows import row_checks
from edgedsv4.runtime.selftest.gpu_steps import step_checks

PLACE = torch.device(DEVICE)
CHECKS = [*product_checks(PLACE, "sm_90"), *row_checks(PLACE, ""), *step_checks(PLACE)]
if has_scaled_products():
    CHECKS += scaled_checks(PLACE, "sm_120")  # other cards have the same values by other products
# The decoders of the other types take minutes in the interpreter and have tests of their own.
QUICK_TYPES = ("BF16", "Q8_0")


def is_quick(check: Check) -> bool:
    kind, _, name = check.name.partition(": ")
    return kind != "weights" or name in QUICK_TYPES


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if DEVICE != "cpu" or is_quick(check)],
    ids=lambda check: check.name,
)
def test_kernels_pass(check: Check) -> None:
    verdict = judge(check, Computing("triton"))
    assert verdict.has_passed, verdict.detail


def test_block_scaled_products_are_checked_where_they_are_used() -> None:
    expected = ["experts of a chunk, 8-bit floats"] if triton_release() >= (3, 7) else []
    assert [check.name for check in scaled_checks(PLACE, "sm_120")] == expected
    assert list(scaled_checks(PLACE, "sm_90")) == []


def test_names_are_told_apart() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
