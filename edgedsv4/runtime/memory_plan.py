"""How many bytes a model and one session need, before anything is allocated.

Pure arithmetic over the configuration, the byte counts of a file's header and the options: no
torch, no file, no look at the machine. What the forward really allocates is compared with these
figures by tests, so the formulas here are the definition of what a session may use.

Rows of the `default` profile are stored as the model was trained to see them (FP8 key/value rows
with bfloat16 rotary part, FP4 index keys, one E8M0 scale per group: DeepSeek-V4 reference code);
those of `exact` in the compute type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.config import Dtype, EngineOptions, ModelConfig, Profile

EXPERTS = "routed experts"
DRAFT = "draft block"
DEFAULT_CONTEXT = 32_768
"""Tokens of a session when nobody asks for a size: long enough to work in, 110 MiB on V4-Flash."""
GPU_CHUNKS = (4096, 2048, 1024, 512, 256)
"""Tokens evaluated at once on a GPU, the best first: more tokens share each read of an expert."""
SPARE_TOKENS = 128
"""Tokens a session can drop again without evaluating any: slots beyond the window."""
SHORTEST_TURN = 32
"""Tokens between two turn checkpoints that the plan reserves for."""
TILE_BYTES = 64 << 20
"""Bound on one tile of a decoded matrix, and on one tile of gathered rows."""
SCORE_BYTES = 256 << 20
"""Bound on the index scores of one tile of tokens on a GPU."""
_ITEM_BYTES: dict[Dtype, int] = {"f32": 4, "f64": 8, "bf16": 2}

_WEIGHT_ITEMS = (
    (DRAFT, r"^(mtp|draft)\.|\.nextn\."),
    (EXPERTS, r"_exps\.|\.experts\."),
    ("shared experts", r"_shexp\.|\.shared_experts\."),
    ("routers", r"ffn_gate_inp|exp_probs_b|tid2eid|\.ffn\.gate(\.|$)"),
    ("hyper-connections", r"hc_"),
    ("indexers", r"indexer"),
    ("compressors", r"compressor"),
    ("attention", r"(attn\.|attn_(q|kv|output|sink))"),
    ("embedding", r"^(token_embd|embed)(\.|$)"),
    ("head", r"^(output|head)(\.|$)"),
    ("norms", r"norm"),
)


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One line of a memory plan."""

    name: str
    nbytes: int
    is_required: bool
    """False for bytes that may stay on disk (mapped experts): they cost speed, not memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What opening a model with one session takes, against a budget."""

    context: int
    """Tokens of the session that was planned."""
    available_bytes: int
    items: tuple[PlanItem, ...]
    """In the order they are granted: weights, working memory, fixed state, growing state."""
    largest_context: int
    """Most tokens that fit the budget, capped by the model's limit; 0 when not even one fits."""
    state_bytes_per_token: Fraction
    """Growth of compressed rows and index keys per token, exact."""

    @property
    def needed_bytes(self) -> int:
        """Sum of the required items."""
        return sum(item.nbytes for item in self.items if item.is_required)

    @property
    def fits(self) -> bool:
        """Whether every required item is inside the budget."""
        return self.needed_bytes <= self.available_bytes

    @property
    def limiting_item(self) -> str | None:
        """Name of the item that the budget ends in, None when all fit."""
        left = self.available_bytes
        for item in self.items:
            if item.is_required:
                left -= item.nbytes
                if left < 0:
                    return item.name
        return None

    @property
    def experts_fit(self) -> bool:
        """Whether the routed experts stay in memory beside everything required."""
        return sum(item.nbytes for item in self.items) <= self.available_bytes

    def to_json(self) -> dict[str, object]:
        """The plan as JSON types."""
        return {
            "context": self.context,
            "available_bytes": self.available_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "limiting_item": self.limiting_item,
            "largest_context": self.largest_context,
            "experts_fit": self.experts_fit,
            "state_bytes_per_token": float(self.state_bytes_per_token),
            "items": [
                {"name": item.name, "bytes": item.nbytes, "required": item.is_required}
                for item in self.items
            ],
        }


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Sizes of everything a timeline remembers, for one profile and compute type."""

    config: ModelConfig
    profile: Profile = "default"
    dtype: Dtype = "f32"
    draft: int = 0
    """Tokens drafted ahead; 0 when the MTP block is not used."""

    @property
    def row_bytes(self) -> int:
        """One key/value row; FP8 rows have a scale per 64 dims, padded to 8 (584 for 448 + 64)."""
        config = self.config
        if self.profile == "exact":
            return config.head_dim * _ITEM_BYTES[self.dtype]
        return config.nope_dim + 2 * config.rope_dim + 8 * _ceil(_ceil(config.nope_dim, 64), 8)

    @property
    def index_key_bytes(self) -> int:
        """One index key; FP4 keys have a scale per 32 dims (68 for 128)."""
        if self.profile == "exact":
            return self.config.index_dim * _ITEM_BYTES[self.dtype]
        return _ceil(self.config.index_dim, 2) + _ceil(self.config.index_dim, 32)

    @property
    def bytes_per_token(self) -> Fraction:
        """Growth per token over all layers: compressed rows and index keys."""
        per_layer = (
            Fraction(self.row_bytes + (self.index_key_bytes if ratio == 4 else 0), ratio)
            for ratio in self.config.compress_ratios
            if ratio
        )
        return sum(per_layer, Fraction(0))

    @property
    def ring_bytes(self) -> int:
        """Window rings with their spare slots, all layers."""
        slots = self.config.window + SPARE_TOKENS
        return self.config.num_layers * slots * self.row_bytes

    @property
    def partial_window_bytes(self) -> int:
        """Raw rows (value and gate) from which unfinished windows are pooled, all layers."""
        return self._partial_bytes({0: 0, 4: 8 + SPARE_TOKENS, 128: 128 + SPARE_TOKENS})

    @property
    def draft_bytes(self) -> int:
        """What drafting needs beside a checkpoint's streams of one position.

        Streams of the last positions, the block's window ring, and the logits behind a sampled
        token and its drafts.
        """
        if not self.draft:
            return 0
        slots = self.config.window + SPARE_TOKENS
        logits = 4 * self.config.vocab_size * (self.draft + 1)
        return slots * (self._stream_bytes + self.row_bytes) + logits

    @property
    def _stream_bytes(self) -> int:
        """The residual streams of one position."""
        return self.config.hc_streams * self.config.hidden_size * _ITEM_BYTES[self.dtype]

    @property
    def checkpoint_bytes(self) -> int:
        """One turn checkpoint at most: windows, unfinished windows and the logits there."""
        streams = self._stream_bytes if self.draft else 0
        spare = self.config.num_layers * SPARE_TOKENS * self.row_bytes
        partial = self._partial_bytes({0: 0, 4: 8, 128: 128})
        return self.ring_bytes - spare + partial + streams + 4 * self.config.vocab_size

    def _partial_bytes(self, rows: Mapping[int, int]) -> int:
        """Raw value and gate rows of all layers, given their number by ratio."""
        wide = 8 if self.dtype == "f64" else 4
        overlapping = 2 * (self.config.head_dim + self.config.index_dim)
        width = {0: 0, 4: overlapping, 128: self.config.head_dim}
        return sum(2 * width[r] * rows[r] * wide for r in self.config.compress_ratios)

    def compressed_row_bytes(self, context: int) -> int:
        """Compressed rows of a timeline of `context` tokens, all layers."""
        ratios = [ratio for ratio in self.config.compress_ratios if ratio]
        return sum(context // ratio * self.row_bytes for ratio in ratios)

    def index_bytes(self, context: int) -> int:
        """Index keys of a timeline of `context` tokens, all layers."""
        return self.config.compress_ratios.count(4) * (context // 4) * self.index_key_bytes

    def state_bytes(self, context: int) -> int:
        """The whole state of a session that holds `context` tokens: KV cache and drafting."""
        growing = self.compressed_row_bytes(context) + self.index_bytes(context)
        return growing + self.ring_bytes + self.partial_window_bytes + self.draft_bytes


def workspace_bytes(config: ModelConfig, chunk: int, dtype: Dtype) -> int:
    """Working memory of one evaluation, bounded by the chunk and not by the context.

    Residual streams (old, new, flattened in float32), queries with their outputs, expert
    activations, logits of one row, and one tile each of a decoded matrix, of gathered rows and of
    index scores. The C kernels need no tiles, but keep the new rows of all layers and int8 forms
    of what is multiplied; the plan takes what is more, whichever computes.
    """
    wide = max(4, _ITEM_BYTES[dtype])
    streams = 4 * config.hc_streams * config.hidden_size
    queries = 3 * config.num_heads * config.head_dim
    attention = config.q_lora_rank + config.output_groups * config.output_lora_rank
    indexer = config.index_heads * (config.index_dim + 1)
    experts = 3 * config.expert_width * max(1, config.num_shared_experts)
    experts += config.experts_per_token * config.hidden_size
    per_token = streams + queries + attention + indexer + experts + 4 * config.hidden_size
    fixed = 4 * config.vocab_size
    torch_bytes = chunk * per_token * wide + 3 * TILE_BYTES
    return fixed + max(torch_bytes, chunk * _native_token_bytes(config) + TILE_BYTES)


def _native_token_bytes(config: ModelConfig) -> int:
    """Working memory of the C kernels per token of a chunk, at most.

    A tile on top of it covers what does not grow with the chunk: index scores and lists.
    """

    def input_bytes(width: int) -> int:
        """A row in float32, and in int8 with a scale and three sums per 32."""
        return 4 * width + width + 2 * 4 * _ceil(width, 32) + 4 * _ceil(width, 16)

    width, heads = config.hidden_size, config.num_heads * config.head_dim
    raw = {0: 0, 4: 16 * (config.head_dim + config.index_dim), 128: 8 * config.head_dim}
    staged = sum(4 * config.head_dim + raw[ratio] + 256 for ratio in config.compress_ratios)
    staged += 4 * config.head_dim + 256  # the draft block has fewer layers, but never more
    streams = 2 * 4 * config.hc_streams * width
    shared = 8 * config.rope_dim + 4 * (config.hc_rows + 5 * config.hc_streams)
    shared += input_bytes(width) + 4 * width
    attention = input_bytes(config.q_lora_rank) + input_bytes(heads) + 4 * heads
    attention += 4 * config.head_dim + input_bytes(config.output_groups * config.output_lora_rank)
    attention += 4 * config.index_heads * (config.index_dim + 1) + 4 * config.index_topk
    inner = config.num_shared_experts * config.expert_width
    pairs = config.experts_per_token * (
        input_bytes(width) + input_bytes(config.expert_width) + 4 * config.expert_width + 256
    )
    experts = 4 * config.num_experts + pairs + input_bytes(inner) + 4 * inner + 4 * width
    draft = input_bytes(width) + 4 * width + config.hc_streams * input_bytes(width)
    total = staged + streams + shared + max(attention, experts, draft)
    return total + total // 15  # some to spare, so that it need not grow token by token


def device_workspace_bytes(config: ModelConfig, chunk: int, profile: Profile = "default") -> int:
    """Working memory of one evaluation on a GPU, at most.

    Everything that a layer makes of a chunk is counted as if it were alive at once: residual
    streams, products of the input, queries, what attention gives, pairs of tokens and experts; rows
    that all layers stage until the chunk is whole; index scores of one tile; and three tiles for
    decoded weights and what the libraries keep. Nothing in it grows with the context but the
    scores, which have a bound. The buffers of a decoded token are far smaller.
    """
    layout = StateLayout(config, profile)
    heads, width = config.num_heads * config.head_dim, config.hidden_size
    half = 2 if profile == "default" else 4  # bytes of an operand of products
    entrance = config.q_lora_rank + 5 * config.head_dim + 4 * config.index_dim + config.index_heads
    indexer = config.index_heads * (config.index_dim + 1) + config.index_topk
    shared = 6 * config.expert_width * config.num_shared_experts
    floats = 4 * config.hc_streams * width + 6 * width + 40 * config.hc_streams
    floats += entrance + config.q_lora_rank + 2 * heads + indexer + shared
    floats += config.output_groups * config.output_lora_rank + 3 * config.num_experts
    pairs = config.experts_per_token * (config.expert_width + width + 8)
    operands = heads + max(heads, config.hc_streams * width) + width + pairs
    per_token = 4 * floats + half * operands
    raw = {0: 0, 4: 16 * (config.head_dim + config.index_dim), 128: 8 * config.head_dim}
    kept = min(chunk, 128 + SPARE_TOKENS)
    staged = sum(
        kept * raw[ratio] + (chunk + config.window) * layout.row_bytes
        for ratio in config.compress_ratios
    )
    scores = min(SCORE_BYTES, 4 * chunk * (config.max_context // 4 + 1)) * 5 // 4
    logits = 3 * 4 * config.vocab_size
    return chunk * per_token + staged + scores + logits + 3 * TILE_BYTES


def weight_items(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by role of the tensors of a file, in the order of a plan.

    Args:
        sizes: tensor name (official or GGUF spelling) and its bytes.
    """
    found = dict.fromkeys([name for name, _ in _WEIGHT_ITEMS] + ["other weights"], 0)
    for name, nbytes in sizes:
        matches = (item for item, pattern in _WEIGHT_ITEMS if re.search(pattern, name))
        found[next(matches, "other weights")] += nbytes
    return {item: nbytes for item, nbytes in found.items() if nbytes}


def plan_memory(
    config: ModelConfig,
    weights: Mapping[str, int],
    options: EngineOptions,
    *,
    available_bytes: int,
    context: int | None = None,
    on_gpu: bool = False,
) -> MemoryPlan:
    """Plan one session.

    Args:
        config: shape of the model.
        weights: bytes by item (`weight_items`); `EXPERTS` and `DRAFT` may stay on disk.
        options: profile, dtype, chunk and checkpoint budget count.
        available_bytes: the memory budget.
        context: tokens of the session; None takes the smallest of the model's limit,
            `DEFAULT_CONTEXT` and what fits (1 when nothing fits, so that the plan shows why).
        on_gpu: the Triton kernels compute: all weights are in the device's memory, but for a draft
            block that is not used.

    Returns:
        The plan; whether it fits is for the caller to act on.
    """
    layout = StateLayout(config, options.profile, options.dtype, options.draft)
    on_disk: tuple[str, ...] = (DRAFT, EXPERTS)
    if on_gpu:
        workspace = device_workspace_bytes(config, options.chunk, options.profile)
        on_disk = () if options.draft else (DRAFT,)
    else:
        workspace = workspace_bytes(config, options.chunk, options.dtype)
    fixed = [
        *(
            PlanItem(name, nbytes, is_required=True)
            for name, nbytes in weights.items()
            if name not in on_disk
        ),
        PlanItem("workspace", workspace, is_required=True),
        PlanItem("window rings", layout.ring_bytes, is_required=True),
        PlanItem("partial windows", layout.partial_window_bytes, is_required=True),
    ]
    if options.draft:
        fixed.append(PlanItem("drafts", layout.draft_bytes, is_required=True))
    budget = available_bytes - sum(item.nbytes for item in fixed)
    largest = _largest_context(layout, options.checkpoint_bytes, budget)
    if context is None:
        context = max(1, min(config.max_context, DEFAULT_CONTEXT, largest))
    growing = [
        PlanItem(name, nbytes, is_required=True)
        for name, nbytes in _growing_items(layout, options.checkpoint_bytes, context).items()
    ]
    return MemoryPlan(
        context=context,
        available_bytes=available_bytes,
        items=(
            *fixed,
            *growing,
            *(PlanItem(name, weights.get(name, 0), is_required=False) for name in on_disk),
        ),
        largest_context=largest,
        state_bytes_per_token=layout.bytes_per_token,
    )


def _growing_items(layout: StateLayout, checkpoint_budget: int, context: int) -> dict[str, int]:
    checkpoints = (context // SHORTEST_TURN + 1) * layout.checkpoint_bytes
    return {
        "compressed rows": layout.compressed_row_bytes(context),
        "index keys": layout.index_bytes(context),
        "turn checkpoints": min(checkpoint_budget, checkpoints),
    }


def _largest_context(layout: StateLayout, checkpoint_budget: int, budget: int) -> int:
    """Most tokens whose growing items fit `budget`; these never shrink with the context."""
    low, high = 0, layout.config.max_context
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_growing_items(layout, checkpoint_budget, middle).values()) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
