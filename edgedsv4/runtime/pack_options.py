"""What can be chosen for the build of an expert pack, and what is told when it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from edgedsv4.errors import ConfigError
from edgedsv4.formats.expert_pack_header import DEFAULT_ALIGNMENT
from edgedsv4.runtime.convert import FloatType, MtpPlace

MAX_ALIGNMENT: Final = 1 << 20

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Choices of a build."""

    resume: bool = False
    """Go on with an unfinished build of the same pack, if there is one."""
    safety_margin_bytes: int = 16 << 30
    """Space on the disk that must be left when the pack is complete, 0..2^50."""
    alignment: int = DEFAULT_ALIGNMENT
    """Bytes to whose multiples experts are aligned, a power of two, 4096..2^20."""
    dense_out: Path | None = None
    """GGUF file to write with everything but the routed experts."""
    frequency: Path | None = None
    """JSON file with `tokens` and `counts` [layers][experts] to put into a version 2 pack."""
    fp8: FloatType = "Q8_0"
    """In `dense_out`, type of matrices that an official checkpoint stores as FP8."""
    mtp: MtpPlace = "separate"
    """Where an official checkpoint's MTP block goes beside `dense_out`; see `ConvertOptions`."""

    def __post_init__(self) -> None:
        if not 0 <= self.safety_margin_bytes <= 1 << 50:
            raise ConfigError(
                f"safety_margin_bytes must be 0..2^50, found {self.safety_margin_bytes}"
            )
        is_power = self.alignment > 0 and self.alignment & (self.alignment - 1) == 0
        if not is_power or not DEFAULT_ALIGNMENT <= self.alignment <= MAX_ALIGNMENT:
            raise ConfigError(
                f"alignment must be a power of two, {DEFAULT_ALIGNMENT}..{MAX_ALIGNMENT},"
                f" found {self.alignment}"
            )
        for name, kind in (("fp8", FloatType), ("mtp", MtpPlace)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(kind))},"
                    f" found {getattr(self, name)!r}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was built."""

    pack: Path
    manifest: Path
    dense: Path | None
    """The companion that was written."""
    version: int
    layers: int
    experts: int
    """Per layer."""
    nbytes: int
    """Bytes of the pack."""
    pack_sha256: str
    block_types: dict[str, int]
    """Storage type -> bytes stored so."""
    resumed_layers: int
    """Layers that an earlier build had finished."""
    notes: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The report as JSON types."""
        values = dataclasses.asdict(self)
        for name in ("pack", "manifest", "dense"):
            values[name] = None if values[name] is None else str(values[name])
        return values | {"notes": list(self.notes)}
