"""Block-scaled products are the matrix unit's own where a launcher asks for them."""

from __future__ import annotations

import pytest
from resources import compile_launch
from variants import module_variants

from edgedsv4.kernels.gpu.expert_scaled import has_scaled_products
from edgedsv4.kernels.gpu.targets import TARGETS

INSTRUCTION = "kind::mxf8f6f4.block_scale"
NATIVE = [target for target in TARGETS if has_scaled_products(target)]


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("kernel", ["_scaled_gate_up_kernel", "_scaled_down_kernel"])
def test_products_are_native(kernel: str, target: str) -> None:
    found = module_variants("cases_expert_scaled", target).values()
    variant = next(v for v in found if v.launch.name == f"expert_scaled.{kernel}")
    products = [
        line
        for line in compile_launch(variant.launch).asm["ptx"].splitlines()
        if "mma.sync" in line
    ]
    assert products
    for line in products:
        assert INSTRUCTION in line
        assert ".e4m3.e4m3.f32.ue8m0" in line


def test_other_cards_launch_none() -> None:
    launching = {t for t in TARGETS if module_variants("cases_expert_scaled", t)}
    assert "sm_120" in launching
    assert launching == set(NATIVE)
