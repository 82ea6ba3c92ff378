"""Converts a model to GGUF, and changes the storage types of one.

`convert_model` loses nothing that the storage types of GGUF can hold: packed FP4 experts become
MXFP4 by moving bits, BF16 and F32 stay, only FP8 is rounded to Q8_0 (and not even that with BF16).
`quantize_model` rounds the matrices of a class to another type. Both stream: memory is bounded by a
few rows whatever the model, and the files appear together or not at all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

from edgedsv4.errors import CancelledError, ConfigError
from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.formats.gguf_stream import StreamedFile, stream_gguf
from edgedsv4.kernels.quantize import ENCODABLE_TYPES
from edgedsv4.model.weight_names import EXPERT_ROWS
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.conversion_metadata import draft_metadata, model_metadata
from edgedsv4.runtime.conversion_plan import ConversionPlan, TypeRule, WeightClass, plan_conversion
from edgedsv4.runtime.shipped_models import open_model

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.model.bound_weights import BoundWeights

MtpPlace = Literal["separate", "inside", "none"]
FloatType = Literal["Q8_0", "BF16", "F16", "F32"]

_PROGRESS_LABEL: Final = "writing bytes"

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Choices of a conversion."""

    fp8: FloatType = "Q8_0"
    """Type of matrices stored as FP8 in the source; BF16 and F32 hold them exactly."""
    mtp: MtpPlace = "separate"
    """Where the MTP block goes: a file `mtp-NAME.gguf` in llama.cpp's form beside the model, inside
    the model under ds4's names (llama.cpp refuses such a file), or nowhere."""
    split_max_bytes: int | None = None
    """Tensor bytes per file, >= 1; None writes one file."""

    def __post_init__(self) -> None:
        _require_choice("fp8", self.fp8, get_args(FloatType))
        _require_choice("mtp", self.mtp, get_args(MtpPlace))
        _require_split(self.split_max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Storage types to write; None keeps the type of the source."""

    experts: str | None = None
    """Routed experts."""
    dense: str | None = None
    """Attention, index queries, shared experts and the MTP block's projections."""
    head: str | None = None
    """The output matrix."""
    embed: str | None = None
    """The token embedding."""
    compressors: str | None = None
    """Projections of the compressors, the indexer's included."""
    mtp: MtpPlace = "inside"
    """As in `ConvertOptions`; a source with the block in a file of its own has none."""
    split_max_bytes: int | None = None
    """Tensor bytes per file, >= 1; None writes one file."""

    def __post_init__(self) -> None:
        for name in ("experts", "dense", "head", "embed", "compressors"):
            value = getattr(self, name)
            if value is not None:
                _require_choice(name, value, tuple(sorted(ENCODABLE_TYPES)))
        _require_choice("mtp", self.mtp, get_args(MtpPlace))
        _require_split(self.split_max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What was written."""

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    """Bytes of tensor data."""
    block_types: dict[str, int]
    """Storage type -> bytes stored so."""
    notes: tuple[str, ...]
    """Types that were not the ones asked for, and warnings about the source."""
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The report as JSON types."""
        return {
            "files": [str(path) for path in self.files],
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "block_types": self.block_types,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def convert_model(
    source: str | Path,
    target: Path,
    options: ConvertOptions | None = None,
    *,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ConvertReport:
    """Write a model as GGUF that this program and llama.cpp read.

    Args:
        source: an official checkpoint directory, a GGUF file, or the name of a shipped model.
        target: the file to write; replaced if it exists.
        options: choices; None takes the defaults.
        on_progress: called as ("writing bytes", done, total).
        should_stop: asked after every piece; True ends the work, nothing is left behind.

    Raises:
        FormatError: the source cannot be used, is damaged, or changed meanwhile.
        ConfigError: `target` is part of the source, or cannot be a file name.
        CapacityError: the disk is too small or full.
        CancelledError: `should_stop` said so.
        OSError: a file cannot be written for another reason.
    """
    chosen = options or ConvertOptions()
    job = _Job(target, _lossless_rule(chosen.fp8), chosen.mtp, chosen.split_max_bytes, {})
    return _run(source, job, on_progress, should_stop)


def quantize_model(
    source: str | Path,
    target: Path,
    options: QuantizeOptions,
    *,
    importance: Mapping[str, Tensor] | None = None,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ConvertReport:
    """Write a model with other storage types.

    Rows that are no whole number of blocks get Q8_0 or BF16 instead; the report says so.

    Args:
        source: as in `convert_model`.
        target: the file to write; replaced if it exists.
        options: the types per class of matrices.
        importance: GGUF tensor name -> float [columns], or [experts, columns]: mean square of the
            inputs that meet each column. What is not named counts all columns alike.
        on_progress: as in `convert_model`.
        should_stop: as in `convert_model`.

    Raises:
        ShapeError: an importance does not fit its tensor.
        FormatError, ConfigError, CapacityError, CancelledError, OSError: as `convert_model`.
    """
    types: dict[WeightClass, BlockType] = {
        kind: BLOCK_TYPES[name]
        for kind in WeightClass
        if kind is not WeightClass.KEPT and (name := getattr(options, kind.value)) is not None
    }

    def rule(kind: WeightClass, stored: BlockType) -> BlockType:
        return types.get(kind) or _kept_type(stored, BLOCK_TYPES["Q8_0"])

    job = _Job(target, rule, options.mtp, options.split_max_bytes, importance or {})
    return _run(source, job, on_progress, should_stop)


@dataclass(frozen=True, slots=True)
class _Job:
    """What both commands differ in."""

    target: Path
    rule: TypeRule
    mtp: MtpPlace
    split_max_bytes: int | None
    importance: Mapping[str, Tensor]


def _run(
    source: str | Path,
    job: _Job,
    on_progress: Progress | None,
    should_stop: Callable[[], bool] | None,
) -> ConvertReport:
    started = time.monotonic()
    with open_model(source) as checkpoint:
        _check_target(job.target, checkpoint)
        bound = bind_weights(checkpoint)
        plan = plan_conversion(bound, job.rule, mtp=job.mtp, importance=job.importance)
        done = 0

        def on_bytes(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if on_progress is not None:
                on_progress(_PROGRESS_LABEL, done, plan.nbytes)
            if should_stop is not None and should_stop():
                raise CancelledError("stopped before the model was complete; nothing was written")

        written = stream_gguf(
            conversion_files(checkpoint, job.target, plan),
            split_max_bytes=job.split_max_bytes,
            on_bytes=on_bytes,
        )
        notes = (*plan.notes, *checkpoint.warnings, *bound.warnings)
    types: Counter[str] = Counter()
    for tensor in (*plan.main, *plan.draft):
        types[tensor.block_type.name] += tensor.nbytes
    return ConvertReport(
        files=written,
        tensors=len(plan.main) + len(plan.draft),
        nbytes=plan.nbytes,
        block_types=dict(types.most_common()),
        notes=notes,
        seconds=time.monotonic() - started,
    )


def lossless_plan(bound: BoundWeights, *, fp8: FloatType, mtp: MtpPlace) -> ConversionPlan:
    """What `convert_model` writes of a model; arguments as in `ConvertOptions`."""
    return plan_conversion(bound, _lossless_rule(fp8), mtp=mtp)


def conversion_files(
    checkpoint: Checkpoint, target: Path, plan: ConversionPlan
) -> list[StreamedFile]:
    """The file of a plan, and the one of the MTP block where it gets its own.

    Raises:
        FormatError: the tokenizer or another text file of the source cannot be used.
    """
    stem = EXPERT_ROWS[0].gguf
    experts = next(t for t in plan.main if t.name.endswith(f"{stem}.weight"))
    metadata = model_metadata(checkpoint, experts.block_type.name)
    files = [StreamedFile(target, metadata, plan.main)]
    if plan.draft:
        own = draft_metadata(metadata, checkpoint.config)
        files.append(StreamedFile(target.with_name(f"mtp-{target.name}"), own, plan.draft))
    return files


def _lossless_rule(fp8: FloatType) -> TypeRule:
    """Types as they are stored, or the nearest that GGUF has."""
    return lambda _kind, stored: _kept_type(stored, BLOCK_TYPES[fp8])


def _kept_type(stored: BlockType, fp8: BlockType) -> BlockType:
    """The type that a matrix keeps, or the nearest one that GGUF has."""
    if stored.name == "FP4_E2M1":
        return BLOCK_TYPES["MXFP4"]
    return fp8 if stored.ggml_id is None else stored


def _check_target(target: Path, checkpoint: Checkpoint) -> None:
    own = {file.path.resolve() for file in checkpoint.files}
    if {target.resolve(), target.with_name(f"mtp-{target.name}").resolve()} & own:
        raise ConfigError(f"{target} is the source itself; name another file to write")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target}: no such directory; make it first")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, found {value!r}")


def _require_split(value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"split_max_bytes must be >= 1, found {value}")
