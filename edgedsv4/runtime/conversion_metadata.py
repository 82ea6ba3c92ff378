"""The metadata of a converted model: every key that llama.cpp asks for, and those of ds4.

Keys of the architecture are made from the checked configuration, whatever the source was. Other
keys are copied from a GGUF source, or read from the text files of an official checkpoint; no chat
template is made up, because the program writes prompts itself.

Source: llama.cpp `conversion/deepseek.py`, `conversion/base.py` and `src/models/deepseek4.cpp`; the
metadata reader of antirez/ds4 (`vocab_size`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf import GgufType, MetadataValue, read_gguf
from edgedsv4.formats.gguf_stream import MetadataEntry
from edgedsv4.formats.strict_json import JsonValue, read_json_object
from edgedsv4.text.vocabulary import Vocabulary, vocabulary_from_json

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.formats.checkpoint import Checkpoint

_PREFIX: Final = "deepseek4."
_SQRT_SOFTPLUS: Final = 4
_QUANTIZATION_VERSION: Final = 2
_PRE_TOKENIZER: Final = "joyai-llm"
_TEXT_LIMIT_BYTES: Final = 16 << 20
# llama.cpp's numbers for "mostly of this type"; the type of the experts decides.
_FILE_TYPES: Final[Mapping[str, int]] = {
    "F32": 0,
    "F16": 1,
    "Q8_0": 7,
    "Q2_K": 10,
    "Q4_K": 15,
    "Q6_K": 18,
    "BF16": 32,
    "MXFP4": 38,
    "NVFP4": 39,
}
# Keys that are written anew, or that belong to one file of a set.
_REWRITTEN: Final = (
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
)
_LATER_RELEASE: Final = "0731"


def model_metadata(checkpoint: Checkpoint, expert_type: str) -> list[MetadataEntry]:
    """Keys of the main file.

    Args:
        checkpoint: the source.
        expert_type: name of the storage type of the routed experts.

    Raises:
        FormatError: the tokenizer or another text file of the source cannot be used.
        UnsupportedModelError: a tokenizer of another kind.
    """
    entries = [_text("general.architecture", "deepseek4")]
    carried = _carried(checkpoint) if checkpoint.kind == "gguf" else _described(checkpoint)
    entries += carried
    entries += config_entries(checkpoint.config)
    if expert_type in _FILE_TYPES:
        entries.append(_u32("general.file_type", _FILE_TYPES[expert_type]))
    entries.append(_u32("general.quantization_version", _QUANTIZATION_VERSION))
    return entries


def draft_metadata(main: Sequence[MetadataEntry], config: ModelConfig) -> list[MetadataEntry]:
    """Keys of the MTP block's own file: the model's, with one layer more.

    Args:
        main: keys of the main file.
        config: configuration of the source.
    """
    layers = config.num_layers + 1
    changed: dict[str, MetadataValue] = {
        f"{_PREFIX}block_count": layers,
        f"{_PREFIX}swiglu_clamp_exp": _limits((*config.swiglu_limits, config.swiglu_limits[-1])),
        f"{_PREFIX}swiglu_clamp_shexp": _limits(
            (*config.shared_swiglu_limits, config.shared_swiglu_limits[-1])
        ),
    }
    entries = [
        MetadataEntry(entry.key, changed.get(entry.key, entry.value), entry.value_type)
        for entry in main
    ]
    entries.append(_u32(f"{_PREFIX}nextn_predict_layers", 1))
    return entries


def config_entries(config: ModelConfig) -> list[MetadataEntry]:
    """Keys that describe a model's shape and constants, as llama.cpp's converter names them."""
    return [MetadataEntry(f"{_PREFIX}{k}", v, t) for k, v, t in _config_keys(config)]


def _config_keys(config: ModelConfig) -> Iterator[tuple[str, MetadataValue, GgufType]]:
    for key, number in _integers(config).items():
        yield key, number, GgufType.U32
    for key, value in _floats(config).items():
        yield key, value, GgufType.F32
    yield "swiglu_clamp_exp", _limits(config.swiglu_limits), GgufType.F32
    yield "swiglu_clamp_shexp", _limits(config.shared_swiglu_limits), GgufType.F32
    # One entry more than layers: the MTP block, in whichever file it is.
    ratios = np.array((*config.compress_ratios, 0), dtype=np.int32)
    yield "attention.compress_ratios", ratios, GgufType.I32
    yield "expert_weights_norm", True, GgufType.BOOL
    scaling = config.rope_scaling
    yield "rope.scaling.type", "none" if scaling is None else "yarn", GgufType.STRING
    if scaling is not None:
        yield "rope.scaling.original_context_length", scaling.original_context, GgufType.U32
        yield "rope.scaling.factor", float(scaling.factor), GgufType.F32
        yield "rope.scaling.yarn_beta_fast", float(scaling.beta_fast), GgufType.F32
        yield "rope.scaling.yarn_beta_slow", float(scaling.beta_slow), GgufType.F32


def _integers(config: ModelConfig) -> dict[str, int]:
    return {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "embedding_length_out": config.hidden_size * config.hc_streams,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.sliding_window": config.window,
        "attention.output_group_count": config.output_groups,
        "attention.output_lora_rank": config.output_lora_rank,
        "attention.indexer.head_count": config.index_heads,
        "attention.indexer.key_length": config.index_dim,
        "attention.indexer.top_k": config.index_topk,
        "rope.dimension_count": config.rope_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.expert_width,
        "expert_gating_func": _SQRT_SOFTPLUS,
        "hash_layer_count": config.num_hash_layers,
        "hyper_connection.count": config.hc_streams,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iterations,
    }


def _floats(config: ModelConfig) -> dict[str, float]:
    return {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.compress_rope_freq_base": config.compress_rope_theta,
        "rope.freq_base": config.rope_theta,
        "expert_weights_scale": config.routed_scale,
        "hyper_connection.epsilon": config.hc_eps,
    }


def _limits(limits: Sequence[float]) -> MetadataValue:
    """Clamps per layer; files write 0 where there is none."""
    return np.array([0.0 if math.isinf(limit) else limit for limit in limits], dtype=np.float32)


def _carried(checkpoint: Checkpoint) -> list[MetadataEntry]:
    """What a GGUF source says beside the architecture's own keys."""
    with read_gguf(checkpoint.dense_path or checkpoint.path) as file:
        return [
            MetadataEntry(key, _owned(value), file.value_types[key])
            for key, value in file.metadata.items()
            if not key.startswith((_PREFIX, "split.")) and key not in _REWRITTEN
        ]


def _owned(value: MetadataValue) -> MetadataValue:
    """The value without a view into the file, which will be closed."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _described(checkpoint: Checkpoint) -> list[MetadataEntry]:
    """What the text files of an official checkpoint say."""
    name, path = checkpoint.name, checkpoint.dense_path or checkpoint.path
    if checkpoint.encoding_hint == "v4-0731" and _LATER_RELEASE not in name:
        # A GGUF file tells which prompt encoding it needs by its name only.
        name = f"{name}-{_LATER_RELEASE}"
    sampling = _json_file(path / "generation_config.json")
    entries = [
        _text("general.type", "model"),
        _text("general.name", name),
        _f32("general.sampling.temp", _number(sampling.get("temperature"), 1.0)),
        _f32("general.sampling.top_p", _number(sampling.get("top_p"), 1.0)),
    ]
    if isinstance(checkpoint.tokenizer, Path):
        vocabulary = vocabulary_from_json(checkpoint.tokenizer, checkpoint.config.vocab_size)
        entries += _tokenizer(vocabulary, checkpoint.config)
        settings = _json_file(path / "tokenizer_config.json")
        for flag in ("add_bos_token", "add_eos_token"):
            value = settings.get(flag)
            if isinstance(value, bool):
                entries.append(MetadataEntry(f"tokenizer.ggml.{flag}", value, GgufType.BOOL))
        template = _template(path, settings)
        if template:
            entries.append(_text("tokenizer.chat_template", template))
    return entries


def _tokenizer(vocabulary: Vocabulary, config: ModelConfig) -> Iterator[MetadataEntry]:
    yield _text("tokenizer.ggml.model", "gpt2")
    yield _text("tokenizer.ggml.pre", _PRE_TOKENIZER)
    tokens = [
        f"[PAD{index}]" if text is None else text for index, text in enumerate(vocabulary.tokens)
    ]
    types = np.array(vocabulary.types, dtype=np.int32)
    merges = [" ".join(pair) for pair in vocabulary.merges]
    yield MetadataEntry("tokenizer.ggml.tokens", tokens, GgufType.STRING)
    yield MetadataEntry("tokenizer.ggml.token_type", types, GgufType.I32)
    yield MetadataEntry("tokenizer.ggml.merges", merges, GgufType.STRING)
    for name, own, known in (
        ("bos", config.bos_id, vocabulary.bos_id),
        ("eos", config.eos_id, vocabulary.eos_id),
        ("padding", config.pad_id, vocabulary.pad_id),
    ):
        token_id = known if own is None else own
        if token_id is not None:
            yield _u32(f"tokenizer.ggml.{name}_token_id", token_id)


def _template(directory: Path, settings: Mapping[str, JsonValue]) -> str | None:
    """The checkpoint's own chat template, if it has one."""
    path = directory / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= _TEXT_LIMIT_BYTES:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FormatError("is not UTF-8 text", path=path, offset=error.start) from error
    found = settings.get("chat_template")
    return found if isinstance(found, str) else None


def _json_file(path: Path) -> Mapping[str, JsonValue]:
    return read_json_object(path, limit_bytes=_TEXT_LIMIT_BYTES) if path.is_file() else {}


def _number(value: JsonValue, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else default  # type: ignore[arg-type]  # is_number says so


def _text(key: str, value: str) -> MetadataEntry:
    return MetadataEntry(key, value, GgufType.STRING)


def _u32(key: str, value: int) -> MetadataEntry:
    return MetadataEntry(key, value, GgufType.U32)


def _f32(key: str, value: float) -> MetadataEntry:
    return MetadataEntry(key, value, GgufType.F32)
