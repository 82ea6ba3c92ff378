"""A card's rates from a card that only returns numbers, and torch's side on the CPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch

from edgedsv4.runtime.gpu_devices import Gpu
from edgedsv4.runtime.link_card import TorchCard, measure_card, measure_overlap
from edgedsv4.runtime.link_step import CARD_TOKENS


@dataclass
class FakeCard:
    """Every run is one more than the one before."""

    name: str = "cuda:3"
    description: str = "Card"
    memory_bytes: int = 1000
    free_bytes: int = 0
    has_read: bool = True
    has_overlap: bool = True
    runs: list[str] = field(default_factory=list)

    def _run(self, what: str) -> float:
        self.runs.append(what)
        return float(self.runs.count(what))

    def to_card(self, seconds: float) -> float:
        return self._run("to") + seconds

    def from_card(self, seconds: float) -> float:
        return self._run("from") + seconds

    def copy(self, seconds: float) -> float:
        return self._run("copy") + seconds

    def read(self) -> float:
        return self._run("read")

    def products(self, seconds: float) -> float:
        return self._run("products") + seconds

    def exchange(self) -> float:
        return self._run("exchange")

    def launch(self, read_rate: float, *, overlap: bool) -> float:
        return self._run(f"launch {overlap} {read_rate}")

    def experts(self, block_type: str) -> FakeCardExperts | None:
        return FakeCardExperts() if block_type == "Q4_K" else None


class FakeCardExperts:
    bytes_per_weight = 0.5

    def rate(self, tokens: int) -> float:
        return float(tokens)


def ignore(_what: str, _done: int, _total: int) -> None:
    pass


def test_every_rate_has_its_runs() -> None:
    found = measure_card(FakeCard(), repeat=3, seconds=0.5, report=ignore)
    assert found.to_card == found.from_card == found.copy == found.products == (1.5, 2.5, 3.5)
    assert found.read == found.exchange_seconds == (1.0, 2.0, 3.0)
    assert (found.name, found.memory_bytes, found.free_bytes) == ("cuda:3", 1000, 1)
    assert found.launch_seconds == found.overlapped_launch_seconds == (1.0, 2.0, 3.0)
    assert found.experts == ()


def test_launches_are_held_against_the_rate_of_reads() -> None:
    card = FakeCard()
    measure_card(card, repeat=3, seconds=0.5, report=ignore)
    assert {run for run in card.runs if run.startswith("launch")} == {
        "launch False 2.0",
        "launch True 2.0",
    }


def test_experts_that_have_no_form_on_the_card_are_left_out() -> None:
    found = measure_card(FakeCard(), 2, 0.5, ignore, ("Q4_K", "IQ1_M"))
    assert [(r.block_type, r.tokens, r.runs) for r in found.experts] == [
        ("Q4_K", tokens, (tokens, tokens)) for tokens in CARD_TOKENS
    ]


def test_where_nothing_overlaps_that_is_not_measured() -> None:
    assert measure_card(FakeCard(has_overlap=False), 1, 0, ignore).overlapped_launch_seconds == ()


def test_reads_are_left_out_where_nothing_can_read() -> None:
    card = FakeCard(has_read=False)
    found = measure_card(card, 1, 0, ignore, ("Q4_K",))
    assert found.read == found.launch_seconds == found.experts == ()
    assert not any(run.startswith(("read", "launch False")) for run in card.runs)


def test_progress_names_the_card_and_what_is_measured() -> None:
    seen: list[tuple[str, int, int]] = []
    measure_card(FakeCard(), repeat=1, seconds=0, report=lambda *step: seen.append(step))
    assert seen[0] == ("cuda:3, copies", 0, 8)
    assert [done for _, done, _ in seen] == list(range(8))


class Meeting(FakeCard):
    """Copies only once the experts compute, and they go on only once it copies."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2, timeout=30)

    def to_card(self, seconds: float) -> float:
        self.both.wait()
        return super().to_card(seconds)


@dataclass
class FakeExperts:
    both: threading.Barrier
    bytes_per_weight: float = 0.25

    def rate(self, threads: int, tokens: int, seconds: float) -> float:
        self.both.wait()
        return threads + tokens + seconds


def test_both_sides_of_an_overlap_work_at_once() -> None:
    card = Meeting()
    found = measure_overlap(
        card, FakeExperts(card.both), "IQ2_XXS", threads=4, repeat=2, seconds=0.5
    )
    assert (found.expert_runs, found.to_card_runs) == ((5.5, 5.5), (1.5, 2.5))
    assert (found.block_type, found.bytes_per_weight) == ("IQ2_XXS", 0.25)


@pytest.fixture
def torch_card() -> TorchCard:
    gpu = Gpu(
        device=torch.device("cpu"),
        kind="cuda",
        description="no card",
        family="sm_90",
        shared_bytes=1,
        warp_size=32,
        multiprocessors=1,
        total_bytes=1 << 20,
        obstacle="none",
    )
    return TorchCard(gpu, piece_bytes=4096)


def test_torchs_side_measures_something(torch_card: TorchCard) -> None:
    found = measure_card(torch_card, repeat=2, seconds=0.0, report=ignore)
    runs = (found.to_card, found.from_card, found.copy, found.products, found.exchange_seconds)
    assert all(len(rates) == 2 and min(rates) > 0 for rates in runs)
    assert (found.read, found.launch_seconds, found.description) == ((), (), "no card")


def test_copies_move_the_bytes(torch_card: TorchCard) -> None:
    for place, memory in enumerate(torch_card._host):
        memory.fill_(place + 1)
    torch_card.to_card(0.0)
    assert [int(memory.max()) for memory in torch_card._near] == list(range(1, 17))
