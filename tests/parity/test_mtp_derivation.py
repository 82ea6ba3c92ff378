"""Self-checks of the MTP derivation: identities that hold without a second implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from parity.mtp_derivation import (
    Array,
    attend,
    attention,
    collapse,
    expand,
    expert,
    fuse_embedding,
    hyper_mix,
    mtp_forward,
    project_heads,
    random_mtp_weights,
    rms_norm,
    rotate,
    route,
    sigmoid,
    sinkhorn,
    turn_at,
)

from edgedsv4.config import ModelConfig

TOKENS = 20
CONFIG = ModelConfig(
    architecture="deepseek4",
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=6,
    head_dim=20,
    rope_dim=8,
    q_lora_rank=24,
    output_groups=3,
    output_lora_rank=10,
    window=8,
    index_heads=2,
    index_dim=8,
    index_topk=4,
    num_experts=7,
    experts_per_token=3,
    num_shared_experts=1,
    expert_width=12,
    routed_scale=1.5,
    num_hash_layers=1,
    swiglu_limits=(1.5, 1.5),
    shared_swiglu_limits=(1.5, 1.5),
    hc_streams=4,
    hc_sinkhorn_iterations=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=None,
    max_context=4096,
    compress_ratios=(0, 0),
    num_draft_layers=1,
)
WEIGHTS = random_mtp_weights(CONFIG, seed=11)
DOUBLES: dict[str, Array] = {name: value.astype(np.float64) for name, value in WEIGHTS.items()}


def draw(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


STREAMS = draw(TOKENS, CONFIG.hc_streams, CONFIG.hidden_size, seed=5) * 3.0
NEXT_IDS = np.random.default_rng(6).integers(0, CONFIG.vocab_size, TOKENS)


@pytest.fixture(scope="module")
def whole() -> tuple[Array, Array]:
    return mtp_forward(WEIGHTS, CONFIG, STREAMS, NEXT_IDS)


def run_with(
    changed: Mapping[str, NDArray[np.floating]] | None = None, config: ModelConfig = CONFIG
) -> Array:
    """Logits with some weights replaced, or under another configuration."""
    return mtp_forward({**WEIGHTS, **(changed or {})}, config, STREAMS, NEXT_IDS)[0]


def gap(a: Array, b: Array) -> float:
    return float(np.abs(a - b).max())


def test_rope_at_position_zero_is_the_identity() -> None:
    head = draw(CONFIG.head_dim, seed=1)
    np.testing.assert_array_equal(rotate(head, turn_at(0, CONFIG)), head)


def test_rope_turns_neighbouring_pairs_of_the_last_dims() -> None:
    head = np.zeros(CONFIG.head_dim)
    head[12], head[14], head[0] = 1.0, 1.0, 1.0
    expected = np.zeros(CONFIG.head_dim)
    expected[0] = 1.0
    expected[12:14] = math.cos(3.0), math.sin(3.0)
    expected[14:16] = math.cos(3.0 / 10.0), math.sin(3.0 / 10.0)  # 10000 ** (-2 / 8) = 1 / 10
    np.testing.assert_allclose(rotate(head, turn_at(3, CONFIG)), expected, atol=1e-14)


def test_conjugate_turn_undoes_rope() -> None:
    head, turn = draw(CONFIG.head_dim, seed=2), turn_at(1234, CONFIG)
    np.testing.assert_allclose(rotate(rotate(head, turn), np.conj(turn)), head, atol=1e-14)


def test_float32_angles_differ_by_rounding_only() -> None:
    exact = mtp_forward(WEIGHTS, CONFIG, STREAMS, NEXT_IDS, first_position=90)[0]
    rounded = mtp_forward(
        WEIGHTS, CONFIG, STREAMS, NEXT_IDS, first_position=90, float32_angles=True
    )[0]
    assert 0.0 < gap(exact, rounded) < 1e-4


@pytest.mark.parametrize("first_position", [1, 7, 3000])
def test_logits_do_not_depend_on_first_position(
    whole: tuple[Array, Array], first_position: int
) -> None:
    moved = mtp_forward(WEIGHTS, CONFIG, STREAMS, NEXT_IDS, first_position=first_position)
    assert gap(moved[0], whole[0]) < 1e-9
    assert gap(moved[1], whole[1]) < 1e-9


def test_row_does_not_depend_on_later_rows(whole: tuple[Array, Array]) -> None:
    prefix = mtp_forward(WEIGHTS, CONFIG, STREAMS[:5], NEXT_IDS[:5])
    np.testing.assert_allclose(prefix[0], whole[0][:5], rtol=0, atol=1e-12)


def test_window_holds_exactly_the_last_rows(whole: tuple[Array, Array]) -> None:
    moved = STREAMS.copy()
    moved[6] = draw(CONFIG.hc_streams, CONFIG.hidden_size, seed=8)
    differs = np.abs(mtp_forward(WEIGHTS, CONFIG, moved, NEXT_IDS)[0] - whole[0]).max(axis=1) > 1e-6
    assert np.flatnonzero(differs).tolist() == list(range(6, 6 + CONFIG.window))


def test_next_id_reaches_the_same_rows_as_its_streams(whole: tuple[Array, Array]) -> None:
    moved = NEXT_IDS.copy()
    moved[6] = (moved[6] + 1) % CONFIG.vocab_size
    differs = np.abs(mtp_forward(WEIGHTS, CONFIG, STREAMS, moved)[0] - whole[0]).max(axis=1) > 1e-6
    assert np.flatnonzero(differs).tolist() == list(range(6, 6 + CONFIG.window))


def test_last_window_alone_gives_the_same_row(whole: tuple[Array, Array]) -> None:
    first = TOKENS - CONFIG.window
    tail = mtp_forward(WEIGHTS, CONFIG, STREAMS[first:], NEXT_IDS[first:], first_position=first)
    np.testing.assert_allclose(tail[0][-1], whole[0][-1], rtol=0, atol=1e-12)
    assert gap(tail[0][-2], whole[0][-2]) > 1e-6


def test_lone_token_sees_its_unrotated_row_against_the_sink() -> None:
    x = draw(CONFIG.hidden_size, seed=3)
    eps = CONFIG.rms_norm_eps
    row = rms_norm(DOUBLES["attn.wkv.weight"] @ x, DOUBLES["attn.kv_norm.weight"], eps)
    low = rms_norm(DOUBLES["attn.wq_a.weight"] @ x, DOUBLES["attn.q_norm.weight"], eps)
    queries = (DOUBLES["attn.wq_b.weight"] @ low).reshape(CONFIG.num_heads, CONFIG.head_dim)
    queries /= np.sqrt((queries**2).mean(axis=1, keepdims=True) + eps)
    share = 1.0 / (1.0 + np.exp(DOUBLES["attn.attn_sink"] - queries @ row / math.sqrt(20)))
    expected = project_heads([s * row for s in share], DOUBLES, CONFIG)
    got = attention([x], [turn_at(37, CONFIG)], DOUBLES, CONFIG)[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_sink_takes_mass_without_scale_or_value() -> None:
    rows = [np.array([2.0, 0.0, 0.0, 0.0])]
    got = attend(np.array([3.0, 0.0, 0.0, 0.0]), rows, 1.0)
    assert got[0] == pytest.approx(2.0 * math.exp(3.0) / (math.exp(3.0) + math.exp(1.0)))


def test_output_groups_do_not_mix_before_the_last_projection() -> None:
    heads = [np.zeros(CONFIG.head_dim) for _ in range(CONFIG.num_heads)]
    heads[3] = draw(CONFIG.head_dim, seed=4)  # second head of group 1, rows 10..19 of wo_a
    low = DOUBLES["attn.wo_a.weight"][10:20, 20:40] @ heads[3]
    expected = DOUBLES["attn.wo_b.weight"][:, 10:20] @ low
    np.testing.assert_allclose(project_heads(heads, DOUBLES, CONFIG), expected, atol=1e-13)


def test_sinkhorn_columns_sum_to_one() -> None:
    comb = sinkhorn(draw(4, 4, seed=9) * 2.0, 20, 1e-6)
    np.testing.assert_allclose(comb.sum(axis=0), 1.0, atol=2e-6)
    np.testing.assert_allclose(comb.sum(axis=1), 1.0, atol=1e-3)


def test_first_sinkhorn_iteration_divides_columns_of_a_row_softmax() -> None:
    logits, eps = draw(4, 4, seed=9), 0.01
    soft = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) + eps
    expected = soft / (soft.sum(axis=0, keepdims=True) + eps)
    np.testing.assert_allclose(sinkhorn(logits, 1, eps), expected, atol=1e-14)


def test_second_sinkhorn_iteration_divides_rows_then_columns() -> None:
    logits, eps = draw(4, 4, seed=9), 0.01
    once = sinkhorn(logits, 1, eps)
    rows = once / (once.sum(axis=1, keepdims=True) + eps)
    expected = rows / (rows.sum(axis=0, keepdims=True) + eps)
    np.testing.assert_allclose(sinkhorn(logits, 2, eps), expected, atol=1e-14)


def test_new_streams_sum_over_the_first_index_of_comb() -> None:
    streams, output, post = draw(4, 32, seed=1), draw(32, seed=2), draw(4, seed=3)
    comb = draw(4, 4, seed=4)
    expected = np.outer(post, output) + comb.T @ streams
    np.testing.assert_allclose(expand(streams, output, post, comb), expected, atol=1e-13)


def test_mixes_without_projection_follow_from_their_base() -> None:
    eps = 0.01
    config = replace(CONFIG, hc_eps=eps)
    base = draw(24, seed=7)
    w = {**DOUBLES, "hc_attn_fn": np.zeros((24, 128)), "hc_attn_base": base}
    pre, post, comb = hyper_mix(draw(4, 32, seed=1), w, "hc_attn", config)
    np.testing.assert_allclose(pre, 1 / (1 + np.exp(-base[:4])) + eps, atol=1e-14)
    np.testing.assert_allclose(post, 2 / (1 + np.exp(-base[4:8])), atol=1e-14)
    np.testing.assert_allclose(comb, sinkhorn(base[8:].reshape(4, 4), 20, eps), atol=1e-14)


def test_mixes_flatten_streams_one_after_another() -> None:
    streams = draw(4, 32, seed=1)
    fn = np.zeros((24, 128))
    fn[2, 32 * 3 + 5] = 1.0
    w = {
        **DOUBLES,
        "hc_attn_fn": fn,
        "hc_attn_base": np.zeros(24),
        "hc_attn_scale": np.array([2.0, 0.0, 0.0]),
    }
    pre = hyper_mix(streams, w, "hc_attn", CONFIG)[0]
    mix = streams[3, 5] / math.sqrt(float((streams**2).mean()) + CONFIG.rms_norm_eps)
    assert pre[2] == pytest.approx(sigmoid(2.0 * mix) + CONFIG.hc_eps)
    assert pre[1] == pytest.approx(0.5 + CONFIG.hc_eps)


def test_swiglu_clamps_before_the_activation_and_the_gate_from_above_only() -> None:
    ones = {f"e.{part}.weight": np.ones((1, 1)) for part in ("w1", "w2", "w3")}
    assert expert(np.array([9.0]), ones, "e", 1.5)[0] == pytest.approx(1.5**2 * sigmoid(1.5))
    assert expert(np.array([-9.0]), ones, "e", 1.5)[0] == pytest.approx(9.0 * 1.5 * sigmoid(-9.0))


def test_routing_weights_sum_to_the_routed_scale() -> None:
    chosen = route(draw(7, seed=1), draw(7, seed=2), CONFIG)
    assert sum(chosen.values()) == pytest.approx(CONFIG.routed_scale)


def test_routing_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = np.array([3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0])
    bias = np.zeros(7)
    assert sorted(route(logits, bias, CONFIG)) == [0, 1, 2]
    bias[[5, 1]] = 10.0, 0.1
    chosen = route(logits, bias, CONFIG)
    scores = np.sqrt(np.log1p(np.exp(logits)))
    assert sorted(chosen) == [0, 1, 5]
    for e in chosen:
        assert chosen[e] == pytest.approx(scores[e] / scores[[0, 1, 5]].sum() * 1.5)


def test_equal_experts_go_to_the_lower_id() -> None:
    assert sorted(route(np.ones(7), np.zeros(7), CONFIG)) == [0, 1, 2]


def test_each_stream_is_normalised_and_projected_on_its_own() -> None:
    w = {**DOUBLES, "e_proj.weight": np.zeros((32, 32))}
    fused = fuse_embedding(STREAMS[0], 4, w, CONFIG)
    for x, got in zip(STREAMS[0], fused, strict=True):
        normed = DOUBLES["hnorm.weight"] * x / math.sqrt(float((x**2).mean()) + 1e-6)
        np.testing.assert_allclose(got, DOUBLES["h_proj.weight"] @ normed, atol=1e-13)


def test_embedding_of_the_next_id_is_added_to_every_stream() -> None:
    without = {**DOUBLES, "e_proj.weight": np.zeros((32, 32))}
    fused = fuse_embedding(STREAMS[0], 4, DOUBLES, CONFIG)
    added = fused - fuse_embedding(STREAMS[0], 4, without, CONFIG)
    np.testing.assert_allclose(added, np.tile(added[0], (4, 1)), atol=1e-13)
    x = DOUBLES["embed.weight"][4]
    normed = DOUBLES["enorm.weight"] * x / math.sqrt(float((x**2).mean()) + 1e-6)
    np.testing.assert_allclose(added[0], DOUBLES["e_proj.weight"] @ normed, atol=1e-13)


def test_silent_sublayers_leave_the_two_stream_mixes() -> None:
    silent = {name: np.zeros_like(value) for name, value in DOUBLES.items() if "w2" in name}
    w = {**DOUBLES, **silent, "attn.wo_b.weight": np.zeros((32, 30))}
    expected = fuse_embedding(STREAMS[0], int(NEXT_IDS[0]), w, CONFIG)
    for name in ("hc_attn", "hc_ffn"):
        expected = hyper_mix(expected, w, name, CONFIG)[2].T @ expected
    got = mtp_forward(w, CONFIG, STREAMS[:1], NEXT_IDS[:1])[1][0]
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_logits_follow_from_the_returned_streams(whole: tuple[Array, Array]) -> None:
    x = whole[1][3]
    mix = DOUBLES["hc_head_fn"] @ x.reshape(-1) / math.sqrt(float((x**2).mean()) + 1e-6)
    pre = 1 / (1 + np.exp(-mix * DOUBLES["hc_head_scale"] - DOUBLES["hc_head_base"])) + 1e-6
    y = rms_norm(collapse(x, pre), DOUBLES["norm.weight"], 1e-6)
    np.testing.assert_allclose(whole[0][3], DOUBLES["head.weight"] @ y, atol=1e-12)


def test_returned_streams_feed_a_further_draft_step(whole: tuple[Array, Array]) -> None:
    logits, streams = mtp_forward(WEIGHTS, CONFIG, whole[1], whole[0].argmax(axis=1))
    assert (logits.shape, streams.shape) == ((TOKENS, 50), (TOKENS, 4, 32))
    assert np.isfinite(logits).all()


def test_fewer_ids_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        mtp_forward(WEIGHTS, CONFIG, STREAMS, NEXT_IDS[:-1])


def test_random_weights_reach_the_clamps_of_both_expert_kinds(whole: tuple[Array, Array]) -> None:
    routed = replace(CONFIG, swiglu_limits=(math.inf, math.inf))
    shared = replace(CONFIG, shared_swiglu_limits=(math.inf, math.inf))
    assert gap(run_with(config=routed), whole[0]) > 0.1
    assert gap(run_with(config=shared), whole[0]) > 0.1


def test_random_biases_change_the_routing(whole: tuple[Array, Array]) -> None:
    assert gap(run_with({"ffn.gate.bias": np.zeros(7)}), whole[0]) > 0.1


def test_random_sinks_take_visible_mass(whole: tuple[Array, Array]) -> None:
    assert gap(run_with({"attn.attn_sink": np.full(6, -1e9)}), whole[0]) > 0.1


@pytest.mark.parametrize("name", sorted(n for n in WEIGHTS if "experts." not in n))
def test_every_weight_reaches_the_logits(name: str, whole: tuple[Array, Array]) -> None:
    other = random_mtp_weights(CONFIG, seed=12)[name]
    assert gap(run_with({name: other}), whole[0]) > 1e-2


def test_random_weights_repeat_with_their_seed() -> None:
    again = random_mtp_weights(CONFIG, seed=11)
    assert sorted(again) == sorted(WEIGHTS)
    for name, value in WEIGHTS.items():
        np.testing.assert_array_equal(again[name], value)
