"""Routing in C against the three steps of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from guarded import Guarded
from numeric import assert_close, assert_same_bits

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.router import rank_experts, route, route_reference, router_scores

lib, ffi = library()
pytestmark = pytest.mark.usefixtures("isa")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def native(
    logits: torch.Tensor, bias: torch.Tensor | None, k: int, run: NativeRun
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    ids, weights = Guarded(tokens, k, dtype=torch.int32), Guarded(tokens, k)
    arguments = (pointer(ids.tensor), pointer(weights.tensor), pointer(logits), pointer(bias))
    sizes = (tokens, experts, k, 1.5)
    run.check(lib.dk_route(run.cdata, *arguments, ffi.NULL, ffi.NULL, *sizes))
    return ids.check(), weights.check()


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 2), (9, 9), (256, 6)])
@pytest.mark.parametrize("biased", [False, True])
def test_matches_the_reference(experts: int, k: int, biased: bool) -> None:
    logits = 4 * draw(7, experts)
    bias = draw(experts) if biased else None
    ids, weights = native(logits, bias, k, NativeRun())
    double = None if bias is None else bias.double()
    expected_ids, expected_weights = route_reference(logits.double(), double, k, 1.5)
    assert ids.long().equal(expected_ids)
    assert_close("weights", weights, expected_weights, 5e-7)


def test_equal_scores_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    ids, _ = native(logits, None, 3, NativeRun())
    assert ids.tolist() == [[0, 1, 3], [0, 1, 2]]


def test_a_bias_selects_and_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 5.0, 0.0, 7.0])
    ids, weights = native(logits, bias, 2, NativeRun())
    assert ids.tolist() == [[1, 3]]
    assert_close("weights", weights, torch.full((1, 2), 0.75))


def test_softplus_keeps_small_and_large_logits_apart() -> None:
    logits = torch.tensor([[-80.0, -20.0, 0.0, 19.99, 20.01, 500.0]])
    _, weights = native(logits, None, 6, NativeRun())
    _, expected = route_reference(logits.double(), None, 6, 1.5)
    assert ((weights - expected).abs() / expected).max() < 5e-7


def test_scores_of_zero_weigh_nothing() -> None:
    _, weights = native(torch.full((1, 3), -300.0), None, 2, NativeRun())
    assert weights.eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_logit_is_reported_even_if_it_is_not_chosen(bad: float) -> None:
    logits = draw(3, 8)
    run = NativeRun()
    native(logits, None, 2, run)
    assert run.cdata.bad == 0
    logits[1, 7] = bad
    native(logits, None, 2, run)
    assert run.cdata.bad != 0


def test_a_nan_is_chosen_as_the_reference_does() -> None:
    logits = draw(2, 8)
    logits[0, 6] = math.nan
    ids, weights = native(logits, None, 3, NativeRun())
    assert ids.long().equal(route_reference(logits, None, 3, 1.5)[0])
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


def test_a_token_does_not_depend_on_others_or_on_threads() -> None:
    logits, bias = draw(50, 33), draw(33)
    ids, weights = native(logits, bias, 5, NativeRun(3))
    own_ids, own_weights = native(logits[31:32], bias, 5, NativeRun())
    assert_same_bits("ids", ids[31:32], own_ids)
    assert_same_bits("weights", weights[31:32], own_weights)


def test_a_table_gives_the_ids_in_its_order() -> None:
    table = torch.tensor([[3, 1], [0, 2], [2, 1]])
    token_ids = torch.tensor([2, 0])
    logits = draw(2, 4)
    ids, weights = Guarded(2, 2, dtype=torch.int32), Guarded(2, 2)
    run = NativeRun()
    arguments = (ids.tensor, weights.tensor, logits, None, table, token_ids)
    run.check(lib.dk_route(run.cdata, *map(pointer, arguments), 2, 4, 2, 1.5))
    assert ids.check().tolist() == [[2, 1], [3, 1]]
    scores = torch.nn.functional.softplus(logits.double()).sqrt().gather(1, table[token_ids])
    assert_close("weights", weights.check(), scores / scores.sum(1, keepdim=True) * 1.5, 5e-7)


def test_weights_of_given_ids() -> None:
    logits, ids = draw(3, 6), torch.tensor([[5, 0], [1, 1], [2, 3]], dtype=torch.int32)
    weights = Guarded(3, 2)
    run = NativeRun()
    arguments = map(pointer, (weights.tensor, logits, ids))
    run.check(lib.dk_route_weights(run.cdata, *arguments, 3, 6, 2, 2.0))
    scores = torch.nn.functional.softplus(logits.double()).sqrt().gather(1, ids.long())
    assert_close("weights", weights.check(), scores / scores.sum(1, keepdim=True) * 2, 5e-7)


def guessed(logits: torch.Tensor, bias: torch.Tensor | None, most: int, run: NativeRun) -> list:
    ids = Guarded(len(logits), most, dtype=torch.int32)
    arguments = (pointer(ids.tensor), pointer(logits), pointer(bias))
    run.check(lib.dk_route_guess(run.cdata, *arguments, *logits.shape, most))
    return ids.check().tolist()


@pytest.mark.parametrize(("experts", "most"), [(1, 1), (5, 2), (64, 64), (256, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_guesses_are_the_best_in_order(experts: int, most: int, biased: bool) -> None:
    logits = 4 * draw(7, experts)
    bias = draw(experts) if biased else None
    selection = router_scores(logits) if bias is None else router_scores(logits) + bias
    expected = rank_experts(selection, most)
    assert guessed(logits, bias, most, NativeRun(2)) == expected.tolist()


def test_guesses_of_a_nan_are_not_reported() -> None:
    run = NativeRun()
    logits = torch.tensor([[1.0, math.nan, 3.0]])
    assert guessed(logits, None, 2, run) == [[1, 2]]
    assert run.cdata.bad == 0


def test_the_public_function_checks_its_arguments() -> None:
    with pytest.raises(ShapeError, match="5 experts asked for, 4 exist"):
        route(torch.zeros(1, 4), None, 5, 1.0)
    with pytest.raises(ShapeError, match=r"bias is \[3\]"):
        route(torch.zeros(1, 4), torch.zeros(3), 2, 1.0)


def test_the_public_function_gives_ids_and_weights() -> None:
    logits = draw(3, 7)
    ids, weights = route(logits, draw(7), 3, 2.0, backend="native")
    expected_ids, expected = route_reference(logits.double(), draw(7).double(), 3, 2.0)
    assert ids.equal(expected_ids)
    assert_close("weights", weights, expected, 5e-7)
