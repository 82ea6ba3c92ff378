"""Gather the fields of a `ModelConfig` from either dialect, with one error for all faults.

A reader puts what it found; a missing or mistyped entry is a fault, and a harmless stand-in takes
its place so that the remaining fields can still be checked against each other.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from edgedsv4.config import MAX_LAYERS, ModelConfig, RopeScaling, config_problems

if TYPE_CHECKING:
    from edgedsv4.formats.faults import FaultList

FieldValue = int | float | str | tuple[int, ...] | tuple[float, ...] | RopeScaling | None

_STAND_INS: dict[str, FieldValue] = {
    "vocab_size": 1 << 24,
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 1,
    "head_dim": 64,
    "rope_dim": 2,
    "q_lora_rank": 64,
    "output_groups": 1,
    "output_lora_rank": 64,
    "window": 1,
    "index_heads": 1,
    "index_dim": 64,
    "index_topk": 1,
    "num_experts": 1,
    "experts_per_token": 1,
    "num_shared_experts": 1,
    "expert_width": 64,
    "routed_scale": 1.0,
    "num_hash_layers": 0,
    "swiglu_limits": (math.inf,),
    "shared_swiglu_limits": (math.inf,),
    "hc_streams": 4,
    "hc_sinkhorn_iterations": 1,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "compress_rope_theta": 1e4,
    "rope_scaling": None,
    "max_context": 1,
    "compress_ratios": (0,),
}
_PER_LAYER = ("compress_ratios", "swiglu_limits", "shared_swiglu_limits")


class ConfigFields:
    """The fields read so far, where each came from, and the faults met on the way."""

    def __init__(self, faults: FaultList) -> None:
        self.faults = faults
        self._values: dict[str, FieldValue] = {}
        self._sources: dict[str, str] = {}
        self._missing: set[str] = set()

    def put(self, field: str, value: FieldValue, source: str) -> None:
        """Store one field; None means that its fault is already recorded.

        Args:
            field: name in `ModelConfig`.
            value: what the file says.
            source: name of the entry in the file, for messages.
        """
        self._sources[field] = source
        if value is None:
            self._missing.add(field)
            value = _STAND_INS[field]
        self._values[field] = value

    def put_optional(self, field: str, value: FieldValue) -> None:
        """Store a field for which None is a value."""
        self._values[field] = value

    def layers(self) -> int | None:
        """The layer count when it is usable, else None: per-layer lists cannot be checked then."""
        count = self._values.get("num_layers")
        if "num_layers" in self._missing or not isinstance(count, int):
            return None
        return count if 1 <= count <= MAX_LAYERS else None

    def put_per_layer(self, field: str, entries: tuple[float, ...] | None, source: str) -> None:
        """Store a list with one entry per layer; longer lists are cut, shorter ones are a fault."""
        layers = self.layers()
        if entries is not None and layers is not None:
            if len(entries) < layers:
                self.faults.add(
                    f"{source} has {len(entries)} entries, expected at least one per layer"
                    f" ({layers})"
                )
                entries = None
            else:
                entries = entries[:layers]
        self.put(field, entries, source)

    def build(self, architecture: str, heading: str) -> ModelConfig:
        """The checked configuration.

        Raises:
            FormatError: with every fault of the file, those of single values included.
            UnsupportedModelError: the file is sound but asks for what this version does not run.
        """
        layers = self.layers()
        for field in _PER_LAYER:
            if field in self._missing or layers is None:
                stand_in = cast("tuple[float, ...]", _STAND_INS[field])
                self._values[field] = stand_in * (layers or 1)
        if layers is None and isinstance(self._values["num_hash_layers"], int):
            self._values["num_hash_layers"] = min(self._values["num_hash_layers"], 0)
        values = cast("dict[str, Any]", {**self._values, "architecture": architecture})
        checked = SimpleNamespace(**{"num_draft_layers": 0, **values})
        for problem in config_problems(cast("ModelConfig", checked)):
            self._report(problem)
        self.faults.raise_if_any(heading)
        return ModelConfig(**values)

    def _report(self, problem: str) -> None:
        words = problem.replace(",", " ").replace(".", " ").split()
        if not self._missing.isdisjoint(words):
            return  # compares with a stand-in, says nothing about the file
        source = self._sources.get(words[0])
        text = problem if source is None else f"{source}: {problem}"
        if words[0] in ("hc_streams", "compress_ratios"):
            self.faults.unsupported(text)
        else:
            self.faults.add(text)
