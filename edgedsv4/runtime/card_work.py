"""What a card does beside reading weights: launches of a token, activations and rows of a chunk.

Counted from the shape of a model, without a card. Launches are those in a line: the shared expert's
run beside the routed ones, and those of routed experts are part of the measured time of experts. A
layer of a token mixes and reads the streams twice (4), multiplies its input, prepares rows, makes
and finishes queries (4), attends (2), multiplies what attention gave (2) and routes (2).

Activations of a chunk, floats of a token in a layer: the streams (D each) go in and out of a mix
and its reading, 3 times in all, twice a layer; queries are written, finished, read, and what
attention gives is written and read, 6 times in all; each chosen expert reads and writes a row of D
and twice of F, in 16 bits. An attention product is one of a query with a row, or of a weight with
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

LAYER_LAUNCHES = 14
"""In a line, for a token in a layer."""
SELECTION_LAUNCHES = 4
"""More of them in a layer that selects rows."""
OTHER_LAUNCHES = 6
"""Before the first layer and after the last."""
CHUNK_LAUNCHES = 45
"""Of a chunk in a layer, most of them small: about ten dense products with a decoding and a
conversion each, and what is between them."""
_STREAM_MOVES = 2 * 3
_QUERY_MOVES = 6
_INDEX_RATIO = 4


def token_launches(config: ModelConfig, depth: int) -> int:
    """Launches in a line of the token after `depth` others."""
    selects = (depth + 1) // _INDEX_RATIO > config.index_topk
    selecting = config.compress_ratios[: config.num_layers].count(_INDEX_RATIO) if selects else 0
    launches = config.num_layers * LAYER_LAUNCHES + selecting * SELECTION_LAUNCHES
    return launches + OTHER_LAUNCHES


def chunk_launches(config: ModelConfig) -> int:
    """Launches of a chunk."""
    return config.num_layers * CHUNK_LAUNCHES


def activation_bytes(config: ModelConfig) -> int:
    """Bytes of activations that a token of a chunk moves in all layers."""
    floats = _STREAM_MOVES * config.hc_streams * config.hidden_size
    floats += _QUERY_MOVES * config.num_heads * config.head_dim
    halves = 2 * config.experts_per_token * (config.hidden_size + config.expert_width)
    return config.num_layers * (4 * floats + 2 * halves)


def attention_products(config: ModelConfig, tokens: int) -> float:
    """Multiplications with an addition by cached rows, of a chunk that begins a timeline."""
    products = 0.0
    for ratio in config.compress_ratios[: config.num_layers]:
        rows = _mean_seen(tokens, config.window)
        if ratio:
            most = config.index_topk if ratio == _INDEX_RATIO else tokens
            rows += _mean_seen(tokens / ratio, most)
        products += 2 * rows * config.num_heads * config.head_dim
        if ratio == _INDEX_RATIO:
            products += tokens / ratio / 2 * config.index_heads * config.index_dim
    return tokens * products


def _mean_seen(rows: float, most: float) -> float:
    """Rows that tokens see on average, of a number that grows from 0 to `rows`, at most `most`."""
    if rows <= most:
        return rows / 2
    return most - most * most / (2 * rows)
