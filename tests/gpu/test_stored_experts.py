"""Experts on the card, in main memory and on a drive: the same text for every size of each."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from edgedsv4 import Engine, EngineOptions, SamplingOptions
from edgedsv4.errors import CapacityError
from edgedsv4.formats.range_reader import HAVE_READER
from edgedsv4.kernels._triton import HAVE_TRITON
from edgedsv4.kernels.native.library import HAVE_NATIVE
from edgedsv4.model import gpu_residents
from edgedsv4.runtime.expert_rates import ExpertRates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HAVE_TRITON and HAVE_NATIVE and HAVE_READER), reason="needs Triton and the C modules"
    ),
]

POCKET = "pocket-v4"
PROMPT = "Tell me a story about a fox and then another one about the sea."
TOKENS = 160
EXPERTS = 56
SLOT = 120 << 10
"""Bytes of a slot."""


def options(**changes: object) -> EngineOptions:
    values = {"device": "cuda", "context": 512, "threads": 4, "prefill_chunk": 256, **changes}
    return EngineOptions(**values)  # type: ignore[arg-type]


@cache
def budgets() -> dict[str, int]:
    """Bytes of the card for none and for some of the experts."""
    with pytest.raises(CapacityError) as caught:
        Engine.open(POCKET, options(vram_bytes=1 << 20))
    least = caught.value.needed_bytes
    return {"none": least, "some": least + EXPERTS * SLOT // 2}


def text(engine: Engine) -> list[int]:
    stops = {engine.config.eos_id: -np.inf}
    sampling = SamplingOptions(temperature=0, max_tokens=TOKENS, logit_bias=stops)
    with engine.new_session() as session:
        session.sync(engine.tokenizer.encode(PROMPT))
        return list(session.generate(sampling))


@cache
def mapped(mode: str, budget: str) -> tuple[list[int], list[int]]:
    """Two replies, one after the other: with `auto` experts may have moved in between."""
    chosen = options(cpu_experts=mode, vram_bytes=budgets()[budget], expert_place="mapped")
    with Engine.open(POCKET, chosen) as engine:
        return text(engine), text(engine)


@pytest.fixture(params=["none", "some"])
def budget(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.parametrize("slots", [4, 20, 80])
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_text_does_not_depend_on_what_is_read_from_the_drive(
    mode: str, budget: str, slots: int
) -> None:
    chosen = options(
        cpu_experts=mode,
        vram_bytes=budgets()[budget],
        expert_place="stored",
        expert_ram_bytes=slots * SLOT,
    )
    with Engine.open(POCKET, chosen) as engine:
        facts = engine.describe()["experts"]
        assert isinstance(facts, dict)
        assert (facts["place"], facts["experts"]) == ("stored", EXPERTS)
        assert (0 < facts["on_card"] < EXPERTS) == (budget == "some")
        assert (text(engine), text(engine)) == mapped(mode, budget)  # cold, then warm
        with engine.new_session() as session:
            experts = session.totals.experts
    assert experts is not None
    assert experts.disk_reads + experts.prefetch_hits > 0
    if slots == 80:
        assert experts.disk_reads + experts.prefetch_hits <= facts["experts"]  # type: ignore[operator]
    if mode == "auto":
        assert (experts.card_hits > 0) == (facts["on_card"] > 0)  # type: ignore[operator]


def test_a_step_with_experts_on_a_drive_is_a_graph() -> None:
    chosen = options(
        vram_bytes=budgets()["some"], expert_place="stored", expert_ram_bytes=20 * SLOT
    )
    with Engine.open(POCKET, chosen) as engine:
        text(engine)
        hybrid = engine._live.model.network.hybrid  # type: ignore[attr-defined]
        assert hybrid.can_be_captured


def test_on_and_off_do_not_depend_on_the_card() -> None:
    for mode in ("on", "off"):
        first, second = mapped(mode, "none")
        assert first == second
        assert mapped(mode, "some") == (first, first)


@pytest.mark.parametrize("place", ["mapped", "stored"])
def test_experts_that_move_to_the_card_change_no_bit_of_a_prompt(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also by chance, so that many move; no tokens are few enough for the CPU.
    monkeypatch.setattr(gpu_residents, "SIGMAS", 0.0)
    monkeypatch.setattr(ExpertRates, "prefers_cpu", lambda *_: False)
    chosen = options(vram_bytes=budgets()["some"], expert_place=place)
    with Engine.open(POCKET, chosen) as engine:
        ids = engine.tokenizer.encode(PROMPT * 4)
        rows = []
        for _ in range(2):
            with engine.new_session() as session:
                rows.append(session.evaluate(ids, logits="all"))
            text(engine)
        facts = engine.describe()["experts"]
        assert isinstance(facts, dict)
        assert facts["moves"] > 10
        assert np.array_equal(*rows)  # type: ignore[arg-type]
