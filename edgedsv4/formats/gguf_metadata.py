"""GGUF key/value pairs of architecture `deepseek4` -> `ModelConfig`, in both dialects that exist.

llama.cpp's converter and antirez/ds4 write the same names but not the same set of them: ds4 has
`vocab_size` and no gating function or shared-expert clamp, llama.cpp the other way round, and
ds4's main files claim an MTP block that is in another file. Integers are accepted in any width,
floats in both.

Source: llama.cpp `src/models/deepseek4.cpp` and `conversion/deepseek.py`; the metadata reader of
antirez/ds4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from edgedsv4.config import MAX_LAYERS, ModelConfig, RopeScaling
from edgedsv4.errors import UnsupportedModelError
from edgedsv4.formats.config_fields import ConfigFields
from edgedsv4.formats.faults import FaultList, quoted

if TYPE_CHECKING:
    from edgedsv4.formats.gguf import GgufFile, MetadataValue

ARCHITECTURE: Final = "deepseek4"
_SQRT_SOFTPLUS: Final = 4
_DEFAULT_ROPE_THETA: Final = 10000.0
_GATING_NAMES: Final = {1: "softmax", 2: "sigmoid"}

_INTEGERS: Final[Mapping[str, str]] = {
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "rope_dim": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "output_groups": "attention.output_group_count",
    "output_lora_rank": "attention.output_lora_rank",
    "window": "attention.sliding_window",
    "index_heads": "attention.indexer.head_count",
    "index_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "num_experts": "expert_count",
    "experts_per_token": "expert_used_count",
    "num_shared_experts": "expert_shared_count",
    "expert_width": "expert_feed_forward_length",
    "num_hash_layers": "hash_layer_count",
    "hc_streams": "hyper_connection.count",
    "hc_sinkhorn_iterations": "hyper_connection.sinkhorn_iterations",
}
_FLOATS: Final[Mapping[str, str]] = {
    "routed_scale": "expert_weights_scale",
    "hc_eps": "hyper_connection.epsilon",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_TOKEN_IDS: Final[Mapping[str, str]] = {
    "bos_id": "tokenizer.ggml.bos_token_id",
    "eos_id": "tokenizer.ggml.eos_token_id",
    "pad_id": "tokenizer.ggml.padding_token_id",
}
_OTHER_ARCHITECTURES: Final[Mapping[str, str]] = {
    "deepseek41": "DeepSeek-V4.1 cannot be run yet",
    "dflash": "this is a DSpark drafter, not a model",
    "deepseek4-dspark": "this is a DSpark drafter, not a model",
    "deepseek4_mtp_support": "this is an MTP block, not a model",
    "clip": "this is a vision projector, not a model",
}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the model configuration of a `deepseek4` file.

    Args:
        file: an opened GGUF file; its tensor table tells whether an MTP block is inside.

    Raises:
        FormatError: keys are missing, mistyped, contradictory or out of range; all of them are
        listed.
        UnsupportedModelError: another architecture, or a variant that this version does not run.
    """
    _check_architecture(file)
    faults = FaultList(file.path)
    keys = GgufKeys(file, faults)
    fields = ConfigFields(faults)
    _read_layer_count(file, keys, fields)
    for field, key in _INTEGERS.items():
        fields.put(field, keys.integer(key), keys.full(key))
    for field, key in _FLOATS.items():
        fields.put(field, keys.number(key), keys.full(key))
    _read_head_dim(keys, fields)
    _read_vocab_size(file, keys, fields)
    _read_rope(keys, fields)
    _read_layer_lists(keys, fields)
    for field, key in _TOKEN_IDS.items():
        fields.put_optional(field, keys.integer(key, default=None))
    _check_constants(keys)
    return fields.build(ARCHITECTURE, "the metadata cannot be used")


class GgufKeys:
    """Typed access to the metadata; a missing or mistyped key becomes a fault and reads as None."""

    def __init__(self, file: GgufFile, faults: FaultList) -> None:
        self._metadata = file.metadata
        self.faults = faults

    def full(self, key: str) -> str:
        """The key as the file spells it; names with a namespace of their own stay as they are."""
        return key if key.startswith("tokenizer.") else f"{ARCHITECTURE}.{key}"

    def has(self, key: str) -> bool:
        """Whether the file has this key."""
        return self.full(key) in self._metadata

    def integer(self, key: str, *, default: int | str | None = "required") -> int | None:
        """An integer of any width; llama.cpp may also write one equal value per layer."""
        value = self._get(key, default == "required")
        if value is None:
            return default if isinstance(default, int) else None
        if isinstance(value, np.ndarray) and value.size and np.all(value == value.flat[0]):
            value = value.flat[0].item()
        if isinstance(value, bool) or not isinstance(value, int):
            self._mistyped(key, "an integer", value)
            return None
        return value

    def number(self, key: str, *, default: float | str | None = "required") -> float | None:
        """A float of either width."""
        value = self._get(key, default == "required")
        if value is None:
            return default if isinstance(default, float) else None
        if not isinstance(value, float):
            self._mistyped(key, "a float", value)
            return None
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """A bool."""
        value = self._get(key, is_required=False)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._mistyped(key, "a bool", value)
            return default
        return value

    def string(self, key: str) -> str | None:
        """A string, or None when it is absent."""
        value = self._get(key, is_required=False)
        if value is None or isinstance(value, str):
            return value
        self._mistyped(key, "a string", value)
        return None

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, cut where no model has layers any more."""
        value = self._get(key, is_required=True)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            self._mistyped(key, "an array of integers", value)
            return None
        return tuple(int(entry) for entry in value[: 2 * MAX_LAYERS])

    def numbers(self, key: str, layers: int | None) -> tuple[float, ...] | None:
        """A list of floats; one float stands for all layers."""
        value = self._get(key, is_required=True)
        if value is None:
            return None
        if isinstance(value, float):
            return (value,) * (layers or 1)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            self._mistyped(key, "an array of floats", value)
            return None
        return tuple(float(entry) for entry in value[: 2 * MAX_LAYERS])

    def _get(self, key: str, is_required: bool) -> MetadataValue | None:
        value = self._metadata.get(self.full(key))
        if value is None and is_required:
            self.faults.add(f"key {self.full(key)} is missing")
        return value

    def _mistyped(self, key: str, expected: str, value: MetadataValue) -> None:
        found = f"{type(value).__name__} {quoted(value)}"
        if isinstance(value, np.ndarray):
            found = f"an array of {value.size} {value.dtype}"
        elif isinstance(value, list):
            found = f"an array of {len(value)} entries"
        self.faults.add(f"key {self.full(key)} must be {expected}, found {found}")


def _check_architecture(file: GgufFile) -> None:
    faults = FaultList(file.path)
    name = file.metadata.get("general.architecture")
    if name is None:
        faults.add("key general.architecture is missing")
    elif not isinstance(name, str):
        faults.add(f"key general.architecture must be a string, found {quoted(name)}")
    elif name != ARCHITECTURE:
        reason = _OTHER_ARCHITECTURES.get(name, "this model cannot be run")
        faults.unsupported(
            f"architecture {quoted(name)} is not supported: {reason};"
            f" supported is {ARCHITECTURE!r} (DeepSeek-V4 Flash and Pro)"
        )
    faults.raise_if_any("not a model")
    engram = next((key for key in file.metadata if key.startswith("deepseek4.engram")), None)
    engram = engram or next((name for name in file.tensors if ".engram_" in name), None)
    if engram is not None:
        raise UnsupportedModelError(
            f"{quoted(engram)} belongs to DeepSeek-V4.1, but the file calls itself {ARCHITECTURE};"
            " it was converted by an early tool and cannot be run, convert it again",
            path=file.path,
        )


def _read_layer_count(file: GgufFile, keys: GgufKeys, fields: ConfigFields) -> None:
    """`block_count` counts the MTP block only when that block is inside (llama.cpp)."""
    blocks = keys.integer("block_count")
    nextn = keys.integer("nextn_predict_layers", default=0) or 0
    drafts = 0
    main = (blocks or 0) - nextn
    if main > 0 and nextn > 0 and f"blk.{main}.nextn.eh_proj.weight" in file.tensors:
        blocks, drafts = main, 1
    if "mtp.0.e_proj.weight" in file.tensors and not has_drafter(file.tensors):
        drafts = 1
    fields.put("num_layers", blocks, keys.full("block_count"))
    fields.put_optional("num_draft_layers", drafts)


def has_drafter(tensors: Mapping[str, object]) -> bool:
    """Whether `mtp.*` tensors are the stages of a DSpark drafter instead of one MTP block."""
    return "mtp.0.main_proj.weight" in tensors or any(name.startswith("mtp.1.") for name in tensors)


def _read_head_dim(keys: GgufKeys, fields: ConfigFields) -> None:
    key_length = keys.integer("attention.key_length")
    value_length = keys.integer("attention.value_length", default=key_length)
    if key_length is not None and value_length not in (None, key_length):
        keys.faults.add(
            f"attention.key_length {key_length} and attention.value_length {value_length} differ;"
            " keys and values are the same row in this architecture"
        )
    fields.put("head_dim", key_length, keys.full("attention.key_length"))
    kv_heads = keys.integer("attention.head_count_kv", default=1)
    if kv_heads not in (None, 1):
        keys.faults.unsupported(f"attention.head_count_kv must be 1, found {kv_heads}")


def _read_vocab_size(file: GgufFile, keys: GgufKeys, fields: ConfigFields) -> None:
    """From the key (ds4), else the token list (llama.cpp), else the rows of the embedding."""
    if keys.has("vocab_size"):
        fields.put("vocab_size", keys.integer("vocab_size"), keys.full("vocab_size"))
        return
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight")
    if isinstance(tokens, list):
        fields.put("vocab_size", len(tokens), "tokenizer.ggml.tokens")
    elif embedding is not None and len(embedding.shape) == 2:
        fields.put("vocab_size", embedding.shape[0], "token_embd.weight")
    else:
        keys.faults.add(
            "vocabulary size unknown: no key deepseek4.vocab_size, no tokenizer.ggml.tokens,"
            " no matrix token_embd.weight"
        )
        fields.put("vocab_size", None, keys.full("vocab_size"))


def _read_rope(keys: GgufKeys, fields: ConfigFields) -> None:
    theta = keys.number("rope.freq_base", default=_DEFAULT_ROPE_THETA)
    fields.put("rope_theta", theta, keys.full("rope.freq_base"))
    # The first conversions called the base of the compressed layers `freq_base_swa`.
    name = "attention.compress_rope_freq_base"
    if not keys.has(name) and keys.has("rope.freq_base_swa"):
        name = "rope.freq_base_swa"
    fields.put("compress_rope_theta", keys.number(name), keys.full(name))
    scaling = _read_scaling(keys)
    fields.put_optional("rope_scaling", scaling)
    context = keys.integer("context_length", default=None)
    if context is None and not keys.has("context_length"):
        if scaling is None:
            keys.faults.add(f"key {keys.full('context_length')} is missing")
        else:
            context = min(int(scaling.factor * scaling.original_context), 1 << 31)
    fields.put("max_context", context, keys.full("context_length"))


def _read_scaling(keys: GgufKeys) -> RopeScaling | None:
    kind = keys.string("rope.scaling.type")
    if kind is None:
        kind = "yarn" if keys.has("rope.scaling.original_context_length") else "none"
    if kind == "none":
        return None
    if kind != "yarn":
        keys.faults.unsupported(f"rope.scaling.type must be 'yarn' or 'none', found {quoted(kind)}")
        return None
    factor = keys.number("rope.scaling.factor")
    original = keys.integer("rope.scaling.original_context_length")
    beta_fast = keys.number("rope.scaling.yarn_beta_fast", default=32.0)
    beta_slow = keys.number("rope.scaling.yarn_beta_slow", default=1.0)
    return scaling_from(keys.faults, factor, original, (beta_fast, beta_slow))


def scaling_from(
    faults: FaultList,
    factor: float | None,
    original: int | None,
    betas: tuple[float | None, float | None],
) -> RopeScaling | None:
    """YaRN parameters, or None when one is unusable (its fault is recorded)."""
    beta_fast, beta_slow = betas
    if factor is None or original is None or beta_fast is None or beta_slow is None:
        return None
    if not factor >= 1 or factor > 1 << 20:
        faults.add(f"the RoPE scaling factor must be 1..1048576, found {factor}")
        return None
    if original > 1 << 31:
        faults.add(
            f"the original context of RoPE scaling must be 1..2147483648, found {quoted(original)}"
        )
        return None
    return RopeScaling(
        factor=factor, original_context=original, beta_fast=beta_fast, beta_slow=beta_slow
    )


def _read_layer_lists(keys: GgufKeys, fields: ConfigFields) -> None:
    ratios = keys.integers("attention.compress_ratios")
    fields.put_per_layer("compress_ratios", ratios, keys.full("attention.compress_ratios"))
    routed = clamps(keys.numbers("swiglu_clamp_exp", fields.layers()))
    shared = routed
    if keys.has("swiglu_clamp_shexp"):
        shared = clamps(keys.numbers("swiglu_clamp_shexp", fields.layers()))
    fields.put_per_layer("swiglu_limits", routed, keys.full("swiglu_clamp_exp"))
    fields.put_per_layer("shared_swiglu_limits", shared, keys.full("swiglu_clamp_shexp"))


def clamps(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """Clamp limits as `ModelConfig` has them: a file writes 0 where it means no clamp."""
    if values is None:
        return None
    return tuple(float("inf") if value == 0 else value for value in values)


def _check_constants(keys: GgufKeys) -> None:
    """Entries that may say only one thing in a model this version runs."""
    gating = keys.integer("expert_gating_func", default=_SQRT_SOFTPLUS)
    if gating not in (None, _SQRT_SOFTPLUS):
        name = _GATING_NAMES.get(gating or 0, "unknown")
        keys.faults.unsupported(
            f"expert_gating_func must be {_SQRT_SOFTPLUS} (sqrt-softplus), found {gating} ({name})"
        )
    if not keys.boolean("expert_weights_norm", default=True):
        keys.faults.unsupported("expert_weights_norm must be true, found false")
    dense = keys.integer("leading_dense_block_count", default=0)
    if dense not in (None, 0):
        keys.faults.unsupported(
            f"leading_dense_block_count must be 0, found {dense}: layers without experts"
        )
