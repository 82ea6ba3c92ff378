"""`config.json` of an official checkpoint -> `ModelConfig`.

DeepSeek's own files and the ones transformers writes name some things differently: the layer
schedule as ratios or as layer types, RoPE scaling as `rope_scaling` or as `rope_parameters` (flat,
or one entry per kind of layer).

Source: the config.json files of the DeepSeek-V4 checkpoints; `DeepseekV4Config` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from edgedsv4.config import MAX_LAYERS, ModelConfig, RopeScaling
from edgedsv4.errors import FormatError, UnsupportedModelError
from edgedsv4.formats.config_fields import ConfigFields
from edgedsv4.formats.faults import FaultList, quoted
from edgedsv4.formats.gguf_metadata import clamps, scaling_from
from edgedsv4.formats.strict_json import JsonValue, read_json_object

MODEL_TYPE: Final = "deepseek_v4"
_LIMIT_BYTES: Final = 1 << 20

_INTEGERS: Final[Mapping[str, str]] = {
    "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "output_groups": "o_groups",
    "output_lora_rank": "o_lora_rank",
    "window": "sliding_window",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_topk": "index_topk",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_width": "moe_intermediate_size",
    "hc_streams": "hc_mult",
    "hc_sinkhorn_iterations": "hc_sinkhorn_iters",
    "max_context": "max_position_embeddings",
}
_FLOATS: Final[Mapping[str, str]] = {
    "routed_scale": "routed_scaling_factor",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "rms_norm_eps",
}
_FIXED: Final[Mapping[str, JsonValue]] = {
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 0,
}
_RATIO_OF_TYPE: Final = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def config_from_json(path: Path) -> ModelConfig:
    """Read the model configuration of an official checkpoint.

    `num_draft_layers` is what the file claims; whether the block's tensors are there is checked
    when the checkpoint is opened. A DSpark drafter counts as none.

    Args:
        path: the `config.json`.

    Raises:
        FormatError: not usable JSON, or entries missing, mistyped, contradictory or out of range;
        all are listed.
        UnsupportedModelError: another model type, or a variant that this version does not run.
    """
    entries = read_json_object(path, limit_bytes=_LIMIT_BYTES)
    _check_model_type(path, entries)
    faults = FaultList(path)
    reader = JsonEntries(entries, faults)
    fields = ConfigFields(faults)
    for field, name in _INTEGERS.items():
        fields.put(field, reader.integer(name), name)
    for field, name in _FLOATS.items():
        fields.put(field, reader.number(name), name)
    _read_rope_dim(reader, fields)
    _read_rope(reader, fields)
    _read_schedule(reader, fields)
    _read_clamps(reader, fields)
    _read_token_ids(reader, fields)
    _check_fixed(entries, faults)
    drafts = reader.integer("num_nextn_predict_layers", default=0) or 0
    fields.put_optional("num_draft_layers", 0 if has_drafter_entries(entries) else min(drafts, 1))
    return fields.build(MODEL_TYPE, "the configuration cannot be used")


def has_drafter_entries(entries: Mapping[str, JsonValue]) -> bool:
    """Whether the checkpoint's `mtp.*` tensors are a DSpark drafter."""
    return any(name.startswith("dspark_") for name in entries)


class JsonEntries:
    """Typed access to a JSON object; what is missing or mistyped is a fault and reads as None."""

    def __init__(
        self, entries: Mapping[str, JsonValue], faults: FaultList, prefix: str = ""
    ) -> None:
        self.entries = entries
        self.faults = faults
        self.prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the entry is there and not null."""
        return self.entries.get(name) is not None

    def integer(self, name: str, *, default: int | str | None = "required") -> int | None:
        """An integer; booleans and floats are not."""
        value = self._get(name, default == "required")
        if value is None:
            return default if isinstance(default, int) else None
        if isinstance(value, bool) or not isinstance(value, int):
            self._mistyped(name, "an integer", value)
            return None
        return value

    def number(self, name: str, *, default: float | str | None = "required") -> float | None:
        """A number, as a float."""
        value = self._get(name, default == "required")
        if value is None:
            return default if isinstance(default, float) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._mistyped(name, "a number", value)
            return None
        return float(value)

    def mapping(self, name: str) -> JsonEntries | None:
        """A nested object, or None when it is absent."""
        value = self._get(name, is_required=False)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._mistyped(name, "an object", value)
            return None
        return JsonEntries(value, self.faults, f"{self.prefix}{name}.")

    def entries_list(self, name: str) -> list[JsonValue] | None:
        """A list, cut where no model has layers any more."""
        value = self._get(name, is_required=True)
        if value is None:
            return None
        if not isinstance(value, list):
            self._mistyped(name, "a list", value)
            return None
        return value[: 2 * MAX_LAYERS]

    def _get(self, name: str, is_required: bool) -> JsonValue:
        value = self.entries.get(name)
        if value is None and is_required:
            self.faults.add(f"{self.prefix}{name} is missing")
        return value

    def _mistyped(self, name: str, expected: str, value: JsonValue) -> None:
        self.faults.add(f"{self.prefix}{name} must be {expected}, found {quoted(value)}")


def _check_model_type(path: Path, entries: Mapping[str, JsonValue]) -> None:
    kind = entries.get("model_type")
    if kind == MODEL_TYPE:
        return
    if kind is None:
        raise FormatError("model_type is missing", path=path)
    if not isinstance(kind, str):
        raise FormatError(f"model_type must be a string, found {quoted(kind)}", path=path)
    reason = "DeepSeek-V4.1 cannot be run yet" if kind == "deepseek_v41" else "it cannot be run"
    raise UnsupportedModelError(
        f"model_type {quoted(kind)} is not supported: {reason};"
        f" supported is {MODEL_TYPE!r} (DeepSeek-V4 Flash and Pro)",
        path=path,
    )


def _read_rope_dim(reader: JsonEntries, fields: ConfigFields) -> None:
    if reader.has("partial_rotary_factor") and not reader.has("qk_rope_head_dim"):
        share = reader.number("partial_rotary_factor")
        if share is not None and not 0 < share <= 1:
            reader.faults.add(f"partial_rotary_factor must be above 0 and at most 1, found {share}")
            share = None
        head_dim = reader.entries.get("head_dim")
        rope_dim = None
        if share is not None and isinstance(head_dim, int):
            rope_dim = int(min(head_dim, 1 << 20) * share)
        fields.put("rope_dim", rope_dim, "partial_rotary_factor")
        return
    fields.put("rope_dim", reader.integer("qk_rope_head_dim"), "qk_rope_head_dim")


def _read_rope(reader: JsonEntries, fields: ConfigFields) -> None:
    theta, compress_theta = (reader, "rope_theta"), (reader, "compress_rope_theta")
    scaling = reader.mapping("rope_scaling")
    parameters = reader.mapping("rope_parameters")
    if parameters is not None:
        main, compress = parameters.mapping("main"), parameters.mapping("compress")
        scaling = scaling or compress or parameters
        if main is not None and main.has("rope_theta"):
            theta = (main, "rope_theta")
        if compress is not None and compress.has("rope_theta"):
            compress_theta = (compress, "rope_theta")
    for field, (source, name) in (("rope_theta", theta), ("compress_rope_theta", compress_theta)):
        fields.put(field, source.number(name), f"{source.prefix}{name}")
    fields.put_optional("rope_scaling", None if scaling is None else _read_scaling(scaling))


def _read_scaling(entries: JsonEntries) -> RopeScaling | None:
    kind = entries.entries.get("rope_type", entries.entries.get("type"))
    if kind is None and entries.has("factor"):
        entries.faults.add(f"{entries.prefix}factor needs a type beside it, such as 'yarn'")
    if kind in (None, "default", "none"):
        return None
    if kind != "yarn":
        entries.faults.unsupported(
            f"{entries.prefix}type must be 'yarn' or 'default', found {quoted(kind)}"
        )
        return None
    magnitude = entries.number("attention_factor", default=1.0)
    if magnitude not in (None, 1.0):
        entries.faults.unsupported(f"{entries.prefix}attention_factor must be 1, found {magnitude}")
    factor = entries.number("factor")
    original = entries.integer("original_max_position_embeddings")
    betas = (entries.number("beta_fast", default=32.0), entries.number("beta_slow", default=1.0))
    return scaling_from(entries.faults, factor, original, betas)


def _read_schedule(reader: JsonEntries, fields: ConfigFields) -> None:
    """Which layers compress, and how many route by token id."""
    if reader.has("layer_types") and not reader.has("compress_ratios"):
        fields.put_per_layer("compress_ratios", _ratios_of_types(reader), "layer_types")
    else:
        fields.put_per_layer("compress_ratios", _ratios(reader), "compress_ratios")
    if reader.has("mlp_layer_types") and not reader.has("num_hash_layers"):
        kinds = reader.entries_list("mlp_layer_types") or []
        count = sum(kind == "hash_moe" for kind in kinds)
        if any(kind != "hash_moe" for kind in kinds[:count]):
            reader.faults.unsupported("mlp_layer_types must have its hash_moe layers first")
        fields.put("num_hash_layers", count, "mlp_layer_types")
    else:
        fields.put("num_hash_layers", reader.integer("num_hash_layers"), "num_hash_layers")


def _ratios(reader: JsonEntries) -> tuple[int, ...] | None:
    found = reader.entries_list("compress_ratios")
    if found is None:
        return None
    ratios = [r for r in found if isinstance(r, int) and not isinstance(r, bool)]
    if len(ratios) != len(found):
        reader.faults.add("compress_ratios must hold integers only")
        return None
    return tuple(ratios)


def _ratios_of_types(reader: JsonEntries) -> tuple[int, ...] | None:
    kinds = reader.entries_list("layer_types")
    if kinds is None:
        return None
    known = dict(_RATIO_OF_TYPE)
    rates = reader.mapping("compress_rates")
    for kind in ("compressed_sparse_attention", "heavily_compressed_attention"):
        if rates is not None and rates.has(kind):
            known[kind] = rates.integer(kind) or known[kind]
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in known]
    if unknown:
        reader.faults.unsupported(
            f"layer_types may hold {tuple(known)}, found {quoted(unknown[0])}"
        )
        return None
    return tuple(known[str(kind)] for kind in kinds)


def _read_clamps(reader: JsonEntries, fields: ConfigFields) -> None:
    """One limit for both kinds of expert in every layer; 0 means no clamp."""
    limit = reader.number("swiglu_limit")
    limits = None if limit is None else clamps((limit,) * (fields.layers() or 1))
    for field in ("swiglu_limits", "shared_swiglu_limits"):
        fields.put_per_layer(field, limits, "swiglu_limit")


def _read_token_ids(reader: JsonEntries, fields: ConfigFields) -> None:
    for field, name in (("bos_id", "bos_token_id"), ("pad_id", "pad_token_id")):
        fields.put_optional(field, reader.integer(name, default=None))
    ends = reader.entries.get("eos_token_id")
    if isinstance(ends, list) and ends:
        # transformers allows several; the first is the one that the prompt encoding writes.
        reader = JsonEntries({"eos_token_id": ends[0]}, reader.faults)
    fields.put_optional("eos_id", reader.integer("eos_token_id", default=None))


def _check_fixed(entries: Mapping[str, JsonValue], faults: FaultList) -> None:
    for name, expected in _FIXED.items():
        found = entries.get(name)
        if found is not None and (found != expected or type(found) is not type(expected)):
            faults.unsupported(f"{name} must be {expected!r}, found {quoted(found)}")
