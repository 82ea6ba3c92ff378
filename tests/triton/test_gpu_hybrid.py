"""Experts of which only a part lives on the card, against the same experts all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from gpu_models import gpu_model_of
from hybrid_models import Experts, Setting, Traveller, hybrid_model_of
from matrix_samples import stored_matrix
from memory_model import evaluate, ids_tensor, model_of
from numeric import assert_close
from tiny_model import random_tensors, random_tokens, tiny_config
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import CancelledError, ConfigError, ExpertReadError, NumericError
from edgedsv4.kernels.expert_ffn import expert_ffn_reference
from edgedsv4.kernels.native.library import library
from edgedsv4.model.gpu_banks import ExpertPlacement, runs_of
from edgedsv4.model.weights import ExpertWeights

if TYPE_CHECKING:
    from edgedsv4.config import CpuExperts

EXPERTS, K, HIDDEN, WIDTH = 4, 2, 32, 32
CONFIG = tiny_config(
    compress_ratios=(0, 0),
    hidden_size=HIDDEN,
    expert_width=WIDTH,
    num_experts=EXPERTS,
    experts_per_token=K,
)
NOBODY: Sequence[Sequence[int]] = ((), ())
SOME: Sequence[Sequence[int]] = ((0, 3), (2,))
EVERYBODY: Sequence[Sequence[int]] = (tuple(range(EXPERTS)),) * 2
PLACEMENTS = pytest.mark.parametrize(
    "resident", [NOBODY, SOME, EVERYBODY], ids=["none", "some", "all"]
)
MODES = pytest.mark.parametrize("mode", ["auto", "on", "off"])
LIMIT = 1.5


@dataclass
class Stored:
    """Experts of two layers of given types, in memory."""

    gate_up: str = "MXFP4"
    down: str = "Q8_0"
    is_resident: bool = True

    def check_unchanged(self) -> None:
        """There is no file."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        return [_expert(self.gate_up, self.down, 100 * layer + e) for e in expert_ids]


@cache
def _expert(gate_up: str, down: str, seed: int) -> ExpertWeights:
    return ExpertWeights(
        w1=stored_matrix(gate_up, WIDTH, HIDDEN, 3 * seed),
        w3=stored_matrix(gate_up, WIDTH, HIDDEN, 3 * seed + 1),
        w2=stored_matrix(down, HIDDEN, WIDTH, 3 * seed + 2),
    )


def inputs(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=draw)
    order = torch.rand(tokens, EXPERTS, generator=draw).argsort(dim=1)[:, :K].sort(dim=1).values
    return x, order.to(torch.int32).contiguous(), torch.rand(tokens, K, generator=draw)


def expected(source: Stored, layer: int, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, ids, weights = given
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(source.fetch(layer, chosen)):
            row = x[token : token + 1].double()
            y = expert_ffn_reference(row, expert.w1, expert.w3, expert.w2, LIMIT)
            out[token] += weights[token, place].double() * y[0]
    return out


def tokens_of(experts: Experts, count: int = 3) -> Tensor:
    given = inputs(count)
    rows = [
        experts.token(layer, *(part[token] for part in given))
        for layer in range(2)
        for token in range(count)
    ]
    return torch.stack(rows)


@MODES
@PLACEMENTS
def test_tokens_get_the_sum_of_their_experts(
    mode: CpuExperts, resident: Sequence[Sequence[int]]
) -> None:
    source = Stored()
    found = tokens_of(Experts(CONFIG, source, resident, setting=Setting(mode=mode)))
    wanted = torch.cat([expected(source, layer, inputs(3)) for layer in range(2)])
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@MODES
@PLACEMENTS
@pytest.mark.parametrize("tokens", [2, 5])
def test_chunks_get_the_sum_of_their_experts(
    mode: CpuExperts, resident: Sequence[Sequence[int]], tokens: int
) -> None:
    source, given = Stored(), inputs(tokens)
    experts = Experts(CONFIG, source, resident, staged=2, setting=Setting(mode=mode))
    for layer, found in enumerate(experts.chunk(*given, precise=True)):
        wanted = expected(source, layer, given)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("gate_up", "down"), [("F32", "BF16"), ("MXFP4", "Q4_0")])
def test_types_that_are_not_taken_apart_by_one_launch_pass_too(gate_up: str, down: str) -> None:
    source, given = Stored(gate_up, down), inputs(3)
    experts = Experts(CONFIG, source, SOME, setting=Setting(mode="off"))
    for layer, found in enumerate(experts.chunk(*given, precise=True)):
        wanted = expected(source, layer, given)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_an_expert_that_moved_is_computed_where_it_went(mode: CpuExperts) -> None:
    source, given = Stored(), inputs(5)
    experts = Experts(CONFIG, source, SOME, staged=2, setting=Setting(mode=mode))
    before = experts.chunk(*given, precise=True)
    hybrid, (layer, other) = experts.hybrid, experts.layers
    for placed, goes, comes in ((layer, 3, 1), (other, 2, 0)):
        if hybrid.host is not None:
            hybrid.host.take_over(placed.layer, goes)
        slot = placed.vacate(goes)
        hybrid._stager.replace(placed, comes, slot)
        placed.occupy(comes, slot)
    assert (layer.missing, other.missing) == ((2, 3), (1, 2, 3))
    wanted = torch.cat([expected(source, at, inputs(3)) for at in range(2)])
    torch.testing.assert_close(tokens_of(experts).double(), wanted, rtol=2e-5, atol=2e-5)
    for found, earlier in zip(experts.chunk(*given, precise=True), before, strict=True):
        assert torch.equal(found, earlier)


def test_off_has_the_same_bits_for_every_placement() -> None:
    results = []
    for resident, staged in ((EVERYBODY, 2), (NOBODY, 4), (SOME, 3)):
        experts = Experts(CONFIG, Stored(), resident, staged=staged, setting=Setting(mode="off"))
        chunk = experts.chunk(*inputs(5), precise=False)
        results.append(torch.cat([tokens_of(experts), *chunk]))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


def test_on_has_the_same_bits_for_every_placement() -> None:
    results = []
    for resident, staged in ((EVERYBODY, 2), (NOBODY, 4), (SOME, 1)):
        setting = Setting(mode="on", has_int8=True)
        experts = Experts(CONFIG, Stored(), resident, staged=staged, setting=setting)
        chunks = [*experts.chunk(*inputs(2), precise=False)]
        chunks += experts.chunk(*inputs(5), precise=False)
        results.append(torch.cat([tokens_of(experts), *chunks]))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_calls_between_launches_have_the_bits_of_calls_by_the_stream(mode: CpuExperts) -> None:
    found = []
    for on_stream in (True, False):
        setting = Setting(mode=mode, on_stream=on_stream, has_int8=True)
        experts = Experts(CONFIG, Stored(), SOME, setting=setting)
        assert experts.hybrid.can_be_captured == on_stream
        found.append(tokens_of(experts))
        host = experts.hybrid.host
        assert host is not None
        assert host.counts().calls == 6
    assert torch.equal(*found)


@MODES
def test_a_source_that_moves_its_experts_gives_the_same(mode: CpuExperts) -> None:
    found = []
    source = Traveller(Stored())
    for given in (Stored(), source):
        setting = Setting(mode=mode, on_stream=False)
        experts = Experts(CONFIG, given, SOME, staged=4, setting=setting)
        before = len(source.fetched)
        chunks = experts.chunk(*inputs(5), precise=True)
        found.append(torch.cat([tokens_of(experts), *chunks]))
    assert torch.equal(*found)
    later = source.fetched[before:]
    assert later
    # What lives on the card is not fetched again, but where the CPU computes everything.
    if mode != "on":
        assert not any(set(ids) & set(SOME[layer]) for layer, ids in later)


def test_a_stream_cannot_call_for_experts_that_move() -> None:
    with pytest.raises(ConfigError, match="stay where they are"):
        Experts(CONFIG, Traveller(Stored()), SOME, setting=Setting(mode="on"))


def test_a_short_chunk_moves_only_what_it_uses() -> None:
    experts = Experts(CONFIG, Stored(), NOBODY, setting=Setting(mode="off"))
    x, ids, weights = inputs(5)
    experts.chunk(x, ids, weights, precise=True)
    everything = experts.hybrid.bytes_moved
    experts.chunk(x[:1], ids[:1], weights[:1], precise=True)
    assert (experts.hybrid.bytes_moved - everything) * EXPERTS == everything * K


def test_a_chunk_that_ended_early_leaves_nothing_behind() -> None:
    experts = Experts(CONFIG, Stored(), SOME, staged=1, setting=Setting(mode="off"))
    given = inputs(5)
    wanted = experts.chunk(*given, precise=True)
    experts.hybrid.begin_chunk(experts._records, 5)
    experts.hybrid.end_chunk()
    for found, again in zip(experts.chunk(*given, precise=True), wanted, strict=True):
        assert torch.equal(found, again)


def test_a_missing_record_is_an_error_and_not_for_ever() -> None:
    experts = Experts(CONFIG, Stored(), NOBODY, setting=Setting(mode="on"))
    x, ids, weights = (part[0] for part in inputs(1))
    wanted = experts.token(1, x, ids, weights)
    host = experts.hybrid.host
    assert host is not None
    _, ffi = library()
    record = host._records[1][3 * int(ids[1])]
    data, record.data = record.data, ffi.NULL
    with pytest.raises(ExpertReadError, match=f"layer 1 needed expert {int(ids[1])}"):
        experts.token(1, x, ids, weights)
    record.data = data
    assert torch.equal(experts.token(1, x, ids, weights), wanted)


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    experts = Experts(CONFIG, Stored(), NOBODY, setting=Setting(mode="on"))
    x, ids, weights = (part[0] for part in inputs(1))
    ids[1] = EXPERTS
    with pytest.raises(NumericError, match=f"expert {EXPERTS} of {EXPERTS}"):
        experts.token(0, x, ids, weights)


def test_one_error_tells_of_all_that_failed() -> None:
    experts = Experts(CONFIG, Stored(), NOBODY, setting=Setting(mode="on"))
    x, ids, weights = (part[0] for part in inputs(1))
    host = experts.hybrid.host
    assert host is not None
    for place in range(2):
        host._jobs[place].failed, host._jobs[place].failed_id = 1, EXPERTS
    with pytest.raises(NumericError, match=f"layer 0 chose expert {EXPERTS}"):
        host.check()
    host.check()
    host._jobs[1].failed = 3
    with pytest.raises(CancelledError, match="layer 1 was stopped"):
        host.check()
    assert torch.equal(experts.token(1, x, ids, weights), experts.token(1, x, ids, weights))


@pytest.mark.parametrize("staged", [1, 4])
@pytest.mark.parametrize("resident", [NOBODY, SOME], ids=["none", "some"])
def test_factors_of_experts_are_applied_where_the_first_is_one(
    resident: tuple[tuple[int, ...], ...], staged: int
) -> None:
    class Scaled(Stored):
        def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
            return [
                replace(
                    expert,
                    w1=replace(expert.w1, tensor_scale=1.0 if expert_id == 0 else 2.0),
                    w2=replace(expert.w2, tensor_scale=1.0 if expert_id == 0 else 0.5),
                )
                for expert_id, expert in zip(
                    expert_ids, super().fetch(layer, expert_ids), strict=True
                )
            ]

    source, given = Scaled("Q8_0", "Q8_0"), inputs(5)
    experts = Experts(CONFIG, source, resident, staged=staged, setting=Setting(mode="off"))
    for layer, found in enumerate(experts.chunk(*given, precise=True)):
        assert_close(f"layer {layer}", found, expected(source, layer, given), 1e-5)


@pytest.mark.parametrize("resident", [((1, 0),), ((2, 2),)])
def test_placements_are_checked(resident: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        ExpertPlacement(resident, 3)
    with pytest.raises(ConfigError, match="at least one"):
        ExpertPlacement(((),), 0)


def test_runs_are_stretches_of_neighbours() -> None:
    assert list(runs_of((0, 1, 2, 5, 7, 8))) == [(0, 3), (5, 1), (7, 2)]
    assert list(runs_of(())) == []


# ---- whole models ----

SMALL = tiny_config(
    compress_ratios=(0,),
    vocab_size=32,
    hidden_size=32,
    num_heads=2,
    head_dim=32,
    q_lora_rank=32,
    output_lora_rank=16,
    expert_width=32,
    num_experts=EXPERTS,
    num_hash_layers=0,
    hc_sinkhorn_iterations=2,
)
SIZES = (3, 1)
EXACT_LIMIT = 2e-4


@MODES
def test_a_model_gives_the_logits_of_the_reference(mode: CpuExperts) -> None:
    reference = model_of(SMALL, random_tensors(SMALL, 5), profile="exact")
    ids = random_tokens(SMALL, sum(SIZES), 5)
    wanted = evaluate(reference, ids, sizes=SIZES)
    model = hybrid_model_of(reference, SOME[:1], Setting(mode=mode))
    found = evaluate(model, ids, cache=model.new_cache(16), sizes=SIZES).cpu()
    assert float((found - wanted).abs().max()) < EXACT_LIMIT


def test_a_failure_on_the_cpu_ends_the_step_and_leaves_the_timeline() -> None:
    reference = model_of(SMALL, random_tensors(SMALL, 5))
    model = hybrid_model_of(reference, NOBODY[:1], Setting(mode="on"))
    hybrid = model.network.hybrid
    assert hybrid is not None
    assert hybrid.host is not None
    _, ffi = library()
    for expert in range(EXPERTS):
        hybrid.host._records[0][3 * expert].data = ffi.NULL
    cache = model.new_cache(8)
    with pytest.raises(ExpertReadError, match="layer 0"):
        model.forward(ids_tensor([3]), cache)
    assert cache.length == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a card")
@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_captured_step_has_the_bits_of_launches(mode: CpuExperts) -> None:
    reference = model_of(SMALL, random_tensors(SMALL, 5), profile="default")
    tokens = ids_tensor(random_tokens(SMALL, 40, 5)).split(1)
    found = []
    for on_stream in (True, False):
        model = hybrid_model_of(reference, SOME[:1], Setting(mode=mode, on_stream=on_stream))
        cache = model.new_cache(64)
        logits = [model.forward(token, cache).logits for token in tokens]
        assert cache.step is not None
        assert bool(cache.step._graphs) == on_stream
        found.append(torch.cat([row for row in logits if row is not None]))
    assert torch.equal(*found)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
def test_off_has_the_bits_of_a_model_that_is_all_on_the_card() -> None:
    reference = model_of(SMALL, random_tensors(SMALL, 5), profile="default")
    ids = random_tokens(SMALL, 40, 5)
    whole = gpu_model_of(reference)
    sizes = (37, 1, 1, 1)
    wanted = evaluate(whole, ids, cache=whole.new_cache(64), sizes=sizes)
    for resident in (NOBODY, SOME, EVERYBODY):
        model = hybrid_model_of(reference, resident[:1], Setting(mode="off"))
        found = evaluate(model, ids, cache=model.new_cache(64), sizes=sizes)
        assert torch.equal(found, wanted)
