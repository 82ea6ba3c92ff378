"""The frozen option records: what the file says, what was chosen at open and per reply.

`ModelConfig` comes from a model file only. `EngineOptions` and `SamplingOptions` hold the defaults
of the command line and of the Python API; no default stands anywhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, TypeGuard, get_args

from edgedsv4.errors import ConfigError

Profile = Literal["exact", "default"]
Backend = Literal["auto", "reference", "native", "triton"]
Dtype = Literal["f32", "f64", "bf16"]
ExpertPlace = Literal["auto", "mapped", "stored"]
IoMode = Literal["auto", "direct", "buffered"]
ExpertVerify = Literal["off", "sampled", "full"]
Prefetch = Literal["off", "hash", "pairs", "gate"]
ReplayPolicy = Literal["aged", "lru", "lfu", "belady"]
CpuExperts = Literal["auto", "on", "off"]

MAX_LAYERS = 512
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 24
MAX_DRAFT = 8
SUPPORTED_RATIOS = (0, 4, 128)
SUPPORTED_STREAMS = (4,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers with compressed KV."""

    factor: float
    """Context extension factor, >= 1."""
    original_context: int
    """Positions the unscaled frequencies were trained on."""
    beta_fast: float = 32.0
    """Rotations above which a frequency is kept as it is."""
    beta_slow: float = 1.0
    """Rotations below which a frequency is divided by `factor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one model, from its file only."""

    architecture: str
    """The file's own name of the architecture (`deepseek4`, `deepseek_v4`); for display, nothing
    branches on it."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    """D, width of one residual stream."""
    num_layers: int
    """L, decoder blocks of the main model."""
    num_heads: int
    """H, query heads."""
    head_dim: int
    """d, width of a query head and of the shared key/value row."""
    rope_dim: int
    """r, the last dims of a head that are rotated."""
    q_lora_rank: int
    """Rq, width of the low-rank query."""
    output_groups: int
    """G, groups of heads of the output projection."""
    output_lora_rank: int
    """Ro, width of one group's low-rank output."""
    window: int
    """W, raw tokens a query sees, itself included."""
    index_heads: int
    """Heads of the lightning indexer."""
    index_dim: int
    """Width of an index head and of an index key."""
    index_topk: int
    """Compressed rows that the indexer selects per query."""
    num_experts: int
    """E, routed experts per layer."""
    experts_per_token: int
    """Routed experts one token uses."""
    num_shared_experts: int
    """Shared experts, each `expert_width` wide, stored as one matrix."""
    expert_width: int
    """F, hidden width of one expert."""
    routed_scale: float
    """Factor on the normalised routing weights."""
    num_hash_layers: int
    """First layers whose experts follow from the token id."""
    swiglu_limits: tuple[float, ...]
    """Clamp of the routed experts, one per layer; inf where there is none."""
    shared_swiglu_limits: tuple[float, ...]
    """Clamp of the shared expert, one per layer."""
    hc_streams: int
    """Residual streams of the hyper-connections."""
    hc_sinkhorn_iterations: int
    """Column normalisations of the mixing matrix."""
    hc_eps: float
    """Epsilon of the hyper-connections (softmax, pre, Sinkhorn)."""
    rms_norm_eps: float
    """Epsilon of every RMS norm, also of the unweighted ones."""
    rope_theta: float
    """RoPE base of layers without compressed KV."""
    compress_rope_theta: float
    """RoPE base of layers with compressed KV."""
    rope_scaling: RopeScaling | None
    """YaRN of layers with compressed KV; None means unscaled."""
    max_context: int
    """Positions the model was made for."""
    compress_ratios: tuple[int, ...]
    """Tokens per compressed row, one per layer; 0 means window only."""
    num_draft_layers: int = 0
    """MTP blocks whose weights are inside the file."""
    bos_id: int | None = None
    """Token that opens every prompt."""
    eos_id: int | None = None
    """Token that ends a reply."""
    pad_id: int | None = None
    """Padding token."""

    @property
    def nope_dim(self) -> int:
        """Dims of a head that are not rotated."""
        return self.head_dim - self.rope_dim

    @property
    def group_width(self) -> int:
        """Input width of one output group, (H / G) * d."""
        return self.num_heads // self.output_groups * self.head_dim

    @property
    def hc_rows(self) -> int:
        """Rows of a hyper-connection matrix: pre, post and the mixing matrix."""
        return (2 + self.hc_streams) * self.hc_streams

    def __post_init__(self) -> None:
        problems = config_problems(self)
        if problems:
            raise ConfigError("; ".join(problems))


def config_problems(config: ModelConfig) -> list[str]:
    """Every contradiction inside a model configuration, as sentences; empty when it can run."""
    problems = [*_count_problems(config), *_constant_problems(config)]
    if problems:
        return problems
    return [*_relation_problems(config), *_layer_list_problems(config)]


def _count_problems(config: ModelConfig) -> list[str]:
    limits = {
        "vocab_size": 1 << 24,
        "hidden_size": 1 << 20,
        "num_layers": MAX_LAYERS,
        "num_heads": 1 << 14,
        "head_dim": 1 << 16,
        "rope_dim": 1 << 16,
        "q_lora_rank": 1 << 20,
        "output_groups": 1 << 14,
        "output_lora_rank": 1 << 20,
        "window": 1 << 20,
        "index_heads": 1 << 14,
        "index_dim": 1 << 16,
        "index_topk": 1 << 24,
        "num_experts": MAX_EXPERTS,
        "experts_per_token": MAX_EXPERTS,
        "expert_width": 1 << 20,
        "hc_sinkhorn_iterations": 1000,
        "max_context": 1 << 31,
    }
    found = {name: getattr(config, name) for name in limits}
    problems = [
        f"{name} must be 1..{limits[name]}, found {value}"
        for name, value in found.items()
        if not 1 <= value <= limits[name]
    ]
    if not 0 <= config.num_shared_experts <= 64:
        problems.append(f"num_shared_experts must be 0..64, found {config.num_shared_experts}")
    if config.num_draft_layers < 0:
        problems.append(f"num_draft_layers must be >= 0, found {config.num_draft_layers}")
    return problems


def _constant_problems(config: ModelConfig) -> list[str]:
    problems: list[str] = []

    def positive(name: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            problems.append(f"{name} must be a finite number above 0, found {value}")

    for name in ("hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta", "routed_scale"):
        positive(name, getattr(config, name))
    for name in ("swiglu_limits", "shared_swiglu_limits"):
        bad = [v for v in getattr(config, name) if math.isnan(v) or v <= 0]
        if bad:
            problems.append(f"{name} must be above 0, found {bad[0]}")
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        for name in ("factor", "original_context", "beta_fast", "beta_slow"):
            positive(f"rope_scaling.{name}", float(getattr(scaling, name)))
    return problems


def _relation_problems(config: ModelConfig) -> list[str]:
    checks = (
        (
            config.experts_per_token <= config.num_experts,
            f"experts_per_token {config.experts_per_token} is more than num_experts"
            f" {config.num_experts}",
        ),
        (
            config.rope_dim % 2 == 0 and config.rope_dim <= config.head_dim,
            f"rope_dim must be even and <= head_dim {config.head_dim}, found {config.rope_dim}",
        ),
        (
            config.rope_dim <= config.index_dim,
            f"rope_dim {config.rope_dim} is more than index_dim {config.index_dim}",
        ),
        (
            config.num_heads % config.output_groups == 0,
            f"num_heads {config.num_heads} is not a multiple of output_groups"
            f" {config.output_groups}",
        ),
        (
            config.hc_streams in SUPPORTED_STREAMS,
            f"hc_streams must be one of {SUPPORTED_STREAMS}, found {config.hc_streams}",
        ),
        (
            0 <= config.num_hash_layers <= config.num_layers,
            f"num_hash_layers must be 0..{config.num_layers}, found {config.num_hash_layers}",
        ),
    )
    problems = [text for holds, text in checks if not holds]
    for name in ("bos_id", "eos_id", "pad_id"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < config.vocab_size:
            problems.append(f"{name} must be below vocab_size {config.vocab_size}, found {value}")
    return problems


def _layer_list_problems(config: ModelConfig) -> list[str]:
    problems = [
        f"{name} needs an entry per layer ({config.num_layers}), found {len(getattr(config, name))}"
        for name in ("compress_ratios", "swiglu_limits", "shared_swiglu_limits")
        if len(getattr(config, name)) != config.num_layers
    ]
    bad = sorted(set(config.compress_ratios) - set(SUPPORTED_RATIOS))
    if bad:
        problems.append(f"compress_ratios may hold {SUPPORTED_RATIOS}, found {bad}")
    if 4 in config.compress_ratios and config.index_dim & (config.index_dim - 1):
        problems.append(f"index_dim must be a power of two (Hadamard), found {config.index_dim}")
    return problems


def _require(holds: bool, name: str, expected: str, found: object) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {expected}, found {found!r}", name=name)


def _require_whole(name: str, value: object, low: int, high: int, expected: str) -> None:
    _require(_is_whole(value), name, f"a whole number {expected}", value)
    _require(_is_whole(value) and low <= value <= high, name, expected, value)


def _is_whole(value: object) -> TypeGuard[int]:
    """Any integer type, numpy's too; a bool is none, although Python counts it as one."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_of(value: object, kind: type | tuple[type, ...]) -> bool:
    """`isinstance` for values whose annotation a caller may not have kept to."""
    return isinstance(value, kind)


CHUNK = 256
"""Tokens evaluated at once in prefill on a CPU: more gain nothing there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Choices made once, when a model is opened."""

    device: str = "auto"
    """`auto`, `cpu`, or a GPU: `cuda`, `cuda:1`, for AMD cards `rocm` too, for Intel's `xpu`.

    `auto` is the first NVIDIA or AMD card that the Triton kernels run on, where backend and dtype
    allow it, else the CPU."""
    context: int | None = None
    """Tokens one session can hold, 1..2^24; None takes the least of the model's own limit, 32,768
    and what memory allows."""
    threads: int | None = None
    """CPU threads, 1..1024; None takes the physical cores this process may use, or one for a model
    of a few megabytes."""
    pin_threads: bool = False
    """Each thread of the native backend keeps to one CPU: steadier where nothing else runs, slower
    where something does."""
    profile: Profile = "default"
    """`exact` computes with weights as stored and activations, KV rows and index keys in the
    compute type. `default` stores FP8 rows and FP4 index keys, as the model was trained to see
    them, and in the native backend rounds the inputs of products with quantized weights to int8, in
    groups of 32; `Engine.describe` names the weight types that take float32 inputs all the same."""
    backend: Backend = "auto"
    """Which implementation computes: `native` (C, CPU, f32), `triton` (GPU, f32) or `reference`
    (torch). `auto` takes the device's own where it can run; a named one that cannot is an error,
    never replaced."""
    dtype: Dtype = "f32"
    """Type the forward computes in."""
    prefill_chunk: int | None = None
    """Tokens evaluated at once in prefill, 1..65,536; the working memory grows with it. None takes
    256 on a CPU and what memory allows on a GPU, at most 4,096."""
    ram_bytes: int | None = None
    """Budget in main memory for weights, KV cache and working memory, and beside a GPU for experts
    that do not live there; None takes what is free."""
    vram_bytes: int | None = None
    """Budget on a GPU; None takes what is free there, which is never exceeded."""
    cpu_experts: CpuExperts = "auto"
    """Who computes the routed experts of a model on a GPU: `auto` takes the card for those that fit
    there and the CPU for the rest, `on` the CPU for all of a token's, `off` the card for all, and
    what does not fit passes through it. With `on` and with `off` the text does not depend on the
    memory of the card, as long as prompts are cut into the same chunks (`prefill_chunk`). With
    `auto` experts move to the card as they turn out to be used often, and the text may take another
    turn where two tokens are nearly equally likely."""
    expert_threads: int | None = None
    """CPU threads for routed experts of a model on a GPU, 1..1024; None takes the physical
    cores."""
    checkpoint_bytes: int = 1 << 30
    """Memory one session may spend on turn checkpoints, 0..2^50; the oldest are given up first."""
    expert_place: ExpertPlace = "auto"
    """Where routed experts are used in main memory: `mapped` in the file, as far as the system
    caches it; `stored` in slots of their own, those used often staying there and the others read as
    they are needed. `auto` takes `stored` when not all fit in the memory budget; those that live on
    a GPU need no place here. The text is the same."""
    expert_ram_bytes: int | None = None
    """Memory for stored experts, part of the budget; None takes what is left beside the rest."""
    expert_freq: str | Path | None = None
    """Frequency file of `edgedsv4 profile`: which experts to expect before enough was seen."""
    io: IoMode = "auto"
    """How stored experts are read: `direct` past the system's cache (O_DIRECT), `buffered` through
    it; `auto` is direct where the file system allows it."""
    io_depth: int = 32
    """Reads of 1 MiB under way at a time, 1..1024; drives reach their rate with 16 or more."""
    expert_verify: ExpertVerify = "off"
    """Which stored experts are compared with the checksums of their pack when they are read: none,
    one in a hundred, or all. GGUF files and official checkpoints have no checksums."""
    prefetch: Prefetch = "hash"
    """Which stored experts are read before they are asked for: with `hash` where that is certain or
    nearly so, those of hash layers and in prefill the next layer's; with `gate` in decode also
    those that the next layer's router would choose of what this layer's saw, while the drive is
    idle; with `pairs` instead those that follow this layer's by a frequency file made with pairs.
    `off` reads nothing ahead. The text is the same."""
    draft: int = 0
    """Tokens that the MTP block drafts ahead of each step, 0..8; 0 keeps it out. The text is the
    same; drafting is measured and pauses where it is slower."""
    draft_model: str | Path | None = None
    """File with the MTP block, for a GGUF model without one inside; shipped models find theirs."""
    dense_model: str | Path | None = None
    """Beside an expert pack, the file or directory with the rest of the model; None takes the one
    that the pack's manifest names, or the one beside the pack."""
    verify: bool = False
    """Read every tensor at open and report scales that are NaN or infinite."""
    sigbus_guard: bool = False
    """Turn an access to a file that was shortened while open into `FormatError`; installs a
    process-wide handler."""

    def __post_init__(self) -> None:
        is_name = _is_of(self.device, str) and bool(self.device)
        _require(is_name, "device", "a device name or 'auto'", self.device)
        if self.context is not None:
            _require_whole("context", self.context, 1, MAX_CONTEXT, f"1..{MAX_CONTEXT}")
        if self.threads is not None:
            _require_whole("threads", self.threads, 1, 1024, "1..1024")
        _require(
            self.profile in ("exact", "default"), "profile", "'exact' or 'default'", self.profile
        )
        names = ("auto", "reference", "native", "triton")
        _require(self.backend in names, "backend", f"one of {names}", self.backend)
        _require(
            self.dtype in ("f32", "f64", "bf16"), "dtype", "'f32', 'f64' or 'bf16'", self.dtype
        )
        if self.prefill_chunk is not None:
            _require_whole("prefill_chunk", self.prefill_chunk, 1, 65536, "1..65536")
        self._check_experts()
        for name in ("ram_bytes", "vram_bytes", "expert_ram_bytes"):
            value = getattr(self, name)
            if value is not None:
                _require_whole(name, value, 1, 1 << 50, "1..2^50 bytes")
        _require(
            self.cpu_experts in ("auto", "on", "off"),
            "cpu_experts",
            "'auto', 'on' or 'off'",
            self.cpu_experts,
        )
        if self.expert_threads is not None:
            _require_whole("expert_threads", self.expert_threads, 1, 1024, "1..1024")
        _require_whole("checkpoint_bytes", self.checkpoint_bytes, 0, 1 << 50, "0..2^50")
        self._check_draft()
        if self.dense_model is not None:
            is_path = _is_of(self.dense_model, (str, Path)) and bool(str(self.dense_model))
            _require(is_path, "dense_model", "a path", self.dense_model)
        for name in ("pin_threads", "verify", "sigbus_guard"):
            _require(_is_of(getattr(self, name), bool), name, "a bool", getattr(self, name))

    def _check_experts(self) -> None:
        kinds = {
            "expert_place": ExpertPlace,
            "expert_verify": ExpertVerify,
            "io": IoMode,
            "prefetch": Prefetch,
        }
        for name, kind in kinds.items():
            names, value = get_args(kind), getattr(self, name)
            _require(value in names, name, f"one of {names}", value)
        _require_whole("io_depth", self.io_depth, 1, 1024, "1..1024")
        if self.expert_freq is not None:
            is_path = _is_of(self.expert_freq, (str, Path)) and bool(str(self.expert_freq))
            _require(is_path, "expert_freq", "a path", self.expert_freq)
        elif self.prefetch == "pairs":
            wanted = "off, hash or gate without expert_freq, whose pairs it takes"
            _require(False, "prefetch", wanted, self.prefetch)

    @property
    def chunk(self) -> int:
        """Tokens evaluated at once in prefill, where nothing better is known."""
        return CHUNK if self.prefill_chunk is None else self.prefill_chunk

    def _check_draft(self) -> None:
        _require_whole("draft", self.draft, 0, MAX_DRAFT, f"0..{MAX_DRAFT}")
        if self.draft_model is not None:
            is_path = _is_of(self.draft_model, (str, Path)) and bool(str(self.draft_model))
            _require(is_path, "draft_model", "a path", self.draft_model)
            _require(self.draft > 0, "draft_model", "left out while draft is 0", self.draft_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Choices made per reply."""

    temperature: float = 1.0
    """0..100; 0 takes the likeliest token, equal logits the lowest id."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches this, above 0 and at most 1."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest one's probability, 0..1."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen before, above 0 and at most
    100."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token generated before, -100..100."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of a token generated before, -100..100."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> added to its logit; -inf bans it."""
    seed: int | None = None
    """0..2^63-1; the same seed, prompt and build give the same text. None draws one."""
    max_tokens: int | None = None
    """Tokens to generate at most, >= 1; None means until the context is full."""

    def __post_init__(self) -> None:
        def ranged(name: str, low: float, high: float, *, above: bool = False) -> None:
            value = getattr(self, name)
            _require(_is_number(value), name, "a number", value)
            holds = (low < value if above else low <= value) and value <= high
            _require(holds, name, f"{'above ' if above else ''}{low}..{high}", value)

        ranged("temperature", 0, 100)
        _require_whole("top_k", self.top_k, 0, 1 << 24, "0..2^24")
        ranged("top_p", 0, 1, above=True)
        ranged("min_p", 0, 1)
        ranged("repetition_penalty", 0, 100, above=True)
        ranged("presence_penalty", -100, 100)
        ranged("frequency_penalty", -100, 100)
        self._check_bias()
        if self.seed is not None:
            _require_whole("seed", self.seed, 0, (1 << 63) - 1, "0..2^63-1")
        if self.max_tokens is not None:
            _require_whole("max_tokens", self.max_tokens, 1, MAX_CONTEXT, f"1..{MAX_CONTEXT}")

    def _check_bias(self) -> None:
        expected = "token ids >= 0 with finite values or -inf"
        _require(_is_of(self.logit_bias, dict), "logit_bias", expected, self.logit_bias)
        for token_id, bias in self.logit_bias.items():
            is_pair = _is_whole(token_id) and _is_number(bias)
            holds = is_pair and token_id >= 0 and bias < math.inf
            _require(holds, "logit_bias", expected, {token_id: bias})
