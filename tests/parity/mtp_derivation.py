"""The multi-token-prediction block once more, from its formulas: token by token in float64.

Its one idea is independence: written from the published description of DeepSeek-V4, without a look
at this package's network, it shares no code and no vectorisation with it, so agreement says much.
Letters: T tokens, hc residual streams, D hidden, H heads, d head_dim, r rotated dims (the last of a
head), E experts, V vocabulary. Weights are [out, in]. Key/value rows are not quantised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

Array = NDArray[np.float64]
Turn = NDArray[np.complex128]
Weights = Mapping[str, Array]
Mixes = tuple[Array, Array, Array]


def sigmoid(x: float) -> float:
    """The logistic function of one number; no exponential that could overflow."""
    return 0.5 * (1.0 + math.tanh(0.5 * x))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale one vector to a root mean square of one, then by `weight`; both [n]."""
    mean_square = sum(float(value) ** 2 for value in x) / len(x)
    return weight * x / math.sqrt(mean_square + eps)


def turn_at(position: int, config: ModelConfig, *, float32_angles: bool = False) -> Turn:
    """The rotation of each RoPE pair at `position` as a complex number of modulus one, [r / 2].

    With `float32_angles` frequency, angle, cosine and sine are each rounded to float32, as a table
    of that type holds them. Plain frequencies of base `rope_theta`: the block compresses nothing.
    """
    kept = np.float32 if float32_angles else np.float64
    turns = []
    for pair in range(config.rope_dim // 2):
        angle = kept(position) * kept(config.rope_theta ** (-2.0 * pair / config.rope_dim))
        turns.append(complex(kept(math.cos(angle)), kept(math.sin(angle))))
    return np.array(turns, dtype=np.complex128)


def rotate(head: Array, turn: Turn) -> Array:
    """Turn the neighbouring pairs (2i, 2i + 1) of the last r dims of one head [d]."""
    turned = head.copy()
    first = len(head) - 2 * len(turn)
    for pair, factor in enumerate(turn):
        a, b = first + 2 * pair, first + 2 * pair + 1
        number = complex(head[a], head[b]) * factor
        turned[a], turned[b] = number.real, number.imag
    return turned


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Row softmax plus `eps`, then column, row, column, ... divisions, `iterations` by columns.

    `logits` and the result are [hc, hc], first index the old stream, second the new one.
    """
    powers = [[math.exp(value - max(row)) for value in row] for row in logits]
    comb = np.array([[power / sum(row) + eps for power in row] for row in powers])
    for done in range(iterations):
        if done > 0:
            comb = np.stack([row / (sum(row) + eps) for row in comb])
        comb = np.stack([column / (sum(column) + eps) for column in comb.T]).T
    return comb


def stream_mix(streams: Array, w: Weights, name: str, config: ModelConfig) -> list[float]:
    """`<name>_fn` times one token's flattened streams [hc, D], over their root mean square."""
    scaled = rms_norm(np.concatenate(list(streams)), np.ones(streams.size), config.rms_norm_eps)
    return [float(np.dot(row, scaled)) for row in w[f"{name}_fn"]]


def hyper_mix(streams: Array, w: Weights, name: str, config: ModelConfig) -> Mixes:
    """How one token's streams [hc, D] enter and leave a sublayer (`hc_attn` or `hc_ffn`).

    Returns:
        pre [hc], each stream's share in the input; post [hc], what each stream takes of the output;
        comb [hc, hc], comb[j, k] is what new stream k takes of old stream j.
    """
    n = config.hc_streams
    mix = stream_mix(streams, w, name, config)
    base, scale = w[f"{name}_base"], w[f"{name}_scale"]
    pre = [sigmoid(mix[j] * scale[0] + base[j]) + config.hc_eps for j in range(n)]
    post = [2.0 * sigmoid(mix[n + j] * scale[1] + base[n + j]) for j in range(n)]
    rows = [range(2 * n + n * j, 2 * n + n * j + n) for j in range(n)]
    logits = np.array([[mix[i] * scale[2] + base[i] for i in row] for row in rows])
    comb = sinkhorn(logits, config.hc_sinkhorn_iterations, config.hc_eps)
    return np.array(pre), np.array(post), comb


def collapse(vectors: Sequence[Array] | Array, shares: Sequence[float] | Array) -> Array:
    """Sum of vectors [n], one share each; [n]."""
    return np.array(sum(share * x for share, x in zip(shares, vectors, strict=True)))


def expand(streams: Array, output: Array, post: Array, comb: Array) -> Array:
    """New streams [hc, D] of one token from its old ones [hc, D] and the sublayer's output [D]."""
    n = len(streams)
    return np.stack([post[k] * output + collapse(streams, comb[:, k]) for k in range(n)])


def query_heads(row: Array, turn: Turn, w: Weights, config: ModelConfig) -> list[Array]:
    """The H rotated queries [d] of one normalised input [D]."""
    eps = config.rms_norm_eps
    low_rank = rms_norm(w["attn.wq_a.weight"] @ row, w["attn.q_norm.weight"], eps)
    heads = np.split(w["attn.wq_b.weight"] @ low_rank, config.num_heads)
    return [rotate(rms_norm(head, np.ones(len(head)), eps), turn) for head in heads]


def attend(query: Array, rows: Sequence[Array], sink: float) -> Array:
    """One head's softmax over the visible rows, which are keys and values at once; all [d].

    `sink` is one more logit, unscaled, that takes its share of the mass and has no value.
    """
    scores = [float(np.dot(query, row)) / math.sqrt(len(query)) for row in rows]
    top = max([*scores, sink])
    mass = sum(math.exp(score - top) for score in scores) + math.exp(sink - top)
    return collapse(rows, [math.exp(score - top) / mass for score in scores])


def project_heads(heads: Sequence[Array], w: Weights, config: ModelConfig) -> Array:
    """Output [D] of one token's H heads [d]; each group of heads has its own low-rank block."""
    groups = np.split(np.concatenate(heads), config.output_groups)
    blocks = np.split(w["attn.wo_a.weight"], config.output_groups)
    low_rank = [block @ group for block, group in zip(blocks, groups, strict=True)]
    return np.array(w["attn.wo_b.weight"] @ np.concatenate(low_rank))


def attention(
    inputs: Sequence[Array], turns: Sequence[Turn], w: Weights, config: ModelConfig
) -> list[Array]:
    """Outputs [D] of normalised inputs [D], each seeing itself and the window - 1 before it."""
    rows: list[Array] = []
    outputs = []
    for t, (x, turn) in enumerate(zip(inputs, turns, strict=True)):
        row = rms_norm(w["attn.wkv.weight"] @ x, w["attn.kv_norm.weight"], config.rms_norm_eps)
        rows.append(rotate(row, turn))
        visible = [rows[s] for s in range(t + 1) if t - s < config.window]
        queries = zip(query_heads(x, turn, w, config), w["attn.attn_sink"], strict=True)
        mixed = [attend(query, visible, float(sink)) for query, sink in queries]
        heads = [rotate(head, np.conj(turn)) for head in mixed]
        outputs.append(project_heads(heads, w, config))
    return outputs


def route(logits: Array, bias: Array, config: ModelConfig) -> dict[int, float]:
    """Weights by expert id, for one token's router logits and the selection bias, both [E].

    The bias takes part in the choice only; of equal experts the lower id wins.
    """
    scores = [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in logits.tolist()]
    ranking = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))
    chosen = ranking[: config.experts_per_token]
    total = sum(scores[e] for e in chosen) + 1e-20
    return {e: scores[e] / total * config.routed_scale for e in chosen}


def expert(x: Array, w: Weights, name: str, limit: float) -> Array:
    """One SwiGLU expert on one input [D]: gate clamped from above, up on both sides; [D]."""
    hidden = []
    for gate_row, up_row in zip(w[f"{name}.w1.weight"], w[f"{name}.w3.weight"], strict=True):
        gate = min(float(np.dot(gate_row, x)), limit)
        up = max(-limit, min(float(np.dot(up_row, x)), limit))
        hidden.append(gate * sigmoid(gate) * up)
    return np.array(w[f"{name}.w2.weight"] @ np.array(hidden))


def moe(x: Array, w: Weights, config: ModelConfig) -> Array:
    """Routed experts plus the shared one at weight one, on one normalised input [D]; [D].

    Clamped as the last main layer: a release has one limit, and the lists end before this block.
    """
    total = np.zeros(config.hidden_size)
    if config.num_shared_experts > 0:
        total = expert(x, w, "ffn.shared_experts", config.shared_swiglu_limits[-1])
    for e, share in route(w["ffn.gate.weight"] @ x, w["ffn.gate.bias"], config).items():
        total = total + share * expert(x, w, f"ffn.experts.{e}", config.swiglu_limits[-1])
    return total


def fuse_embedding(streams: Array, token_id: int, w: Weights, config: ModelConfig) -> Array:
    """Input streams [hc, D]: the next token's embedding and each stream, projected and added."""
    eps = config.rms_norm_eps
    embedded = w["e_proj.weight"] @ rms_norm(w["embed.weight"][token_id], w["enorm.weight"], eps)
    hidden = [w["h_proj.weight"] @ rms_norm(x, w["hnorm.weight"], eps) for x in streams]
    return np.stack([embedded + z for z in hidden])


def head_logits(streams: Array, w: Weights, config: ModelConfig) -> Array:
    """Logits [V] of one token's streams [hc, D], through the block's own stream mix and norm."""
    mix = stream_mix(streams, w, "hc_head", config)
    scale, base = w["hc_head_scale"], w["hc_head_base"]
    shares = [sigmoid(m * scale[0] + b) + config.hc_eps for m, b in zip(mix, base, strict=True)]
    y = rms_norm(collapse(streams, shares), w["norm.weight"], config.rms_norm_eps)
    return np.array(w["head.weight"] @ y)


def mtp_forward(
    weights: Mapping[str, NDArray[np.floating]],
    config: ModelConfig,
    streams: NDArray[np.floating],
    next_ids: NDArray[np.integer],
    *,
    first_position: int = 0,
    float32_angles: bool = False,
) -> tuple[Array, Array]:
    """Evaluate the block on T neighbouring positions with an empty window before them.

    Args:
        weights: the block's tensors by checkpoint name without `mtp.0.`, and `embed.weight` and
            `head.weight` of the main model; any float type, converted to float64.
        config: shape and constants of the model.
        streams: the main model's streams after its last layer, before its head, [T, hc, D].
        next_ids: for each position i the token at i + 1, [T] ints in 0..V-1.
        first_position: position of the first row; the others follow it.
        float32_angles: round the RoPE tables to float32, see `turn_at`.

    Returns:
        logits [T, V], row i for the token at i + 2; the streams before the block's head [T, hc, D].
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    given = np.asarray(streams, dtype=np.float64)
    state = [fuse_embedding(x, int(i), w, config) for x, i in zip(given, next_ids, strict=True)]
    positions = range(first_position, first_position + len(state))
    turns = [turn_at(p, config, float32_angles=float32_angles) for p in positions]

    inputs, mixes = [], []
    for x in state:
        pre, post, comb = hyper_mix(x, w, "hc_attn", config)
        y = collapse(x, pre)
        inputs.append(rms_norm(y, w["attn_norm.weight"], config.rms_norm_eps))
        mixes.append((post, comb))
    for t, output in enumerate(attention(inputs, turns, w, config)):
        state[t] = expand(state[t], output, *mixes[t])

    for t, x in enumerate(state):
        pre, post, comb = hyper_mix(x, w, "hc_ffn", config)
        y = rms_norm(collapse(x, pre), w["ffn_norm.weight"], config.rms_norm_eps)
        state[t] = expand(x, moe(y, w, config), post, comb)
    logits = [head_logits(x, w, config) for x in state]
    return np.array(logits), np.array(state)


def random_mtp_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights for `mtp_forward`: clamps, sinks and biases large enough to show in its output."""
    c = config
    rng = np.random.default_rng(seed)
    made: dict[str, NDArray[np.float32]] = {}

    def normal(name: str, shape: int | tuple[int, int], spread: float, centre: float = 0.0) -> None:
        made[name] = (centre + spread * rng.standard_normal(shape)).astype(np.float32)

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        normal(name, (rows, columns), gain / math.sqrt(columns))

    def swiglu(name: str, width: int, limit: float) -> None:
        # Gate and up spread as far as the clamp, so that it cuts about one value in four.
        gain = limit if math.isfinite(limit) else 1.0
        matrix(f"{name}.w1.weight", width, c.hidden_size, gain)
        matrix(f"{name}.w3.weight", width, c.hidden_size, gain)
        matrix(f"{name}.w2.weight", c.hidden_size, width, 1.0 / gain)

    for name in ("attn_norm", "ffn_norm", "enorm", "hnorm", "norm"):
        normal(f"{name}.weight", c.hidden_size, 0.2, 1.0)
    normal("attn.q_norm.weight", c.q_lora_rank, 0.2, 1.0)
    normal("attn.kv_norm.weight", c.head_dim, 0.2, 1.0)
    normal("attn.attn_sink", c.num_heads, 1.0)
    low_rank = c.output_groups * c.output_lora_rank
    matrix("attn.wq_a.weight", c.q_lora_rank, c.hidden_size)
    matrix("attn.wq_b.weight", c.num_heads * c.head_dim, c.q_lora_rank)
    matrix("attn.wkv.weight", c.head_dim, c.hidden_size)
    matrix("attn.wo_a.weight", low_rank, c.group_width)
    matrix("attn.wo_b.weight", c.hidden_size, low_rank, 2.0)
    mixes = {"hc_attn": (c.hc_rows, 3), "hc_ffn": (c.hc_rows, 3), "hc_head": (c.hc_streams, 1)}
    for name, (rows, scales) in mixes.items():
        matrix(f"{name}_fn", rows, c.hc_streams * c.hidden_size)
        normal(f"{name}_base", rows, 0.5)
        normal(f"{name}_scale", scales, 0.2, 1.0)
    matrix("ffn.gate.weight", c.num_experts, c.hidden_size, 1.5)
    normal("ffn.gate.bias", c.num_experts, 0.5)
    for e in range(c.num_experts):
        swiglu(f"ffn.experts.{e}", c.expert_width, c.swiglu_limits[-1])
    if c.num_shared_experts > 0:
        width = c.num_shared_experts * c.expert_width
        swiglu("ffn.shared_experts", width, c.shared_swiglu_limits[-1])
    matrix("e_proj.weight", c.hidden_size, c.hidden_size)
    matrix("h_proj.weight", c.hidden_size, c.hidden_size)
    matrix("embed.weight", c.vocab_size, c.hidden_size)
    matrix("head.weight", c.vocab_size, c.hidden_size, 2.0)
    return made
