"""Pieces of a card's step are measured: small ones by the interpreter, real ones on a GPU."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

from edgedsv4.errors import ConfigError
from edgedsv4.kernels._triton import IS_INTERPRETED
from edgedsv4.runtime import link_step
from edgedsv4.runtime.gpu_devices import gpu_of
from edgedsv4.runtime.link_card import TorchCard, measure_card
from edgedsv4.runtime.link_memory import ExpertBench, ExpertShape
from edgedsv4.runtime.link_step import (
    CardExpertBench,
    call_seconds,
    exchange_seconds,
    has_card_form,
    launch_seconds,
)

pytestmark = pytest.mark.usefixtures("few_programs")
SMALL = ExpertShape(64, 32)
CARD = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def _few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        for name in ("_LAUNCHES", "_MATRICES", "_REPLAYS", "_CHUNKS", "_EXCHANGES"):
            monkeypatch.setattr(link_step, name, 1)
        monkeypatch.setattr(link_step, "_BANK", 8)
        monkeypatch.setattr(link_step, "AT_ONCE", 4)


def family() -> str:
    return "sm_90" if DEVICE == "cpu" else gpu_of(CARD).family


def test_launch_is_what_is_left_over_beside_reading() -> None:
    found = launch_seconds(CARD, family(), 1e30, overlap=False, shape=SMALL)
    assert 1e-7 < found < 10
    # A memory so slow that reading explains all of it.
    assert launch_seconds(CARD, family(), 1.0, overlap=False, shape=SMALL) == 1e-9


def test_exchange_calls_the_host_and_takes_its_sums() -> None:
    assert 1e-7 < exchange_seconds(CARD, 1, SMALL) < 1


@pytest.mark.parametrize("experts", [1, 2, link_step.AT_ONCE])
@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_calls_of_a_step_are_timed_one_by_one(experts: int, nbytes: int) -> None:
    bench = ExpertBench("Q4_K", nbytes, ExpertShape(256, 256))
    experts = min(experts, link_step.AT_ONCE)  # which is less for the interpreter
    found = call_seconds(bench, CARD, 2, experts, 5)
    assert len(found) >= 5
    assert all(0 < seconds < 1 for seconds in found)


def test_experts_of_a_type_have_rates() -> None:
    bench = CardExpertBench("MXFP4", CARD, family(), 1 << 20, SMALL)
    assert bench.bytes_per_weight == pytest.approx(17 / 32, rel=0.01)
    assert bench.rate(1) > 0
    assert bench.rate(2) > 0


def test_types_without_a_form_on_a_card_are_refused() -> None:
    assert has_card_form("Q4_K")
    assert not has_card_form("IQ1_M")
    with pytest.raises(ConfigError, match="IQ1_M"):
        CardExpertBench("IQ1_M", CARD, family(), 1 << 20, SMALL)


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU")
def test_all_rates_of_a_card_are_of_a_cards_size() -> None:
    card = TorchCard(gpu_of(CARD))
    found = measure_card(card, 2, 0.02, lambda *_: None, ("IQ2_XXS", "Q2_K"))
    assert all(5e-7 < seconds < 5e-5 for seconds in found.launch_seconds)
    assert all(5e-6 < seconds < 1e-3 for seconds in found.exchange_seconds)
    assert len(found.experts) == 2 * len(link_step.CARD_TOKENS)
    # One token reads; many multiply more with each weight.
    for kind in ("IQ2_XXS", "Q2_K"):
        rates = [rate for rate in found.experts if rate.block_type == kind]
        assert rates[-1].products_per_second > rates[0].products_per_second
