"""What a measurement of a random network builds and runs, and the ranges of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgedsv4.errors import ConfigError
from edgedsv4.runtime.synthetic_network import EXPERT_TYPES, ExpertRecipe, SyntheticName

if TYPE_CHECKING:
    from edgedsv4.config import CpuExperts, ModelConfig

DEPTHS = (0, 16_384, 65_536, 262_144)
"""Where decode is measured unless told otherwise; the end of the context comes on top."""
WARM_UPS = 3
"""Tokens decoded before those that count."""
PROFILED_TOKENS = 5
"""Tokens whose kernels are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """What `measure_synthetic` builds and runs."""

    name: SyntheticName = "flash"
    """Released shape: `flash` or `pro`."""
    experts: ExpertRecipe = "q2"
    """Block types of the routed experts: `q2`, `mxfp4` or `q4k`."""
    layers: int | None = None
    """First layers only; None takes all."""
    device: str = "auto"
    """As `EngineOptions.device`; it has to be a GPU."""
    vram_bytes: int | None = None
    """Memory budget; None takes what is free."""
    prompts: tuple[int, ...] = (512, 4096)
    """Tokens of each prefill, all in one chunk."""
    generate: int = 100
    """Tokens of a decode; 0 leaves decode out."""
    depths: tuple[int, ...] | None = None
    """Tokens in the timeline before a decode; None takes `DEPTHS` and the end of the context."""
    repeat: int = 3
    """Runs of a prefill that count, after one that does not."""
    kernels: bool = False
    """Measure the kernels of a step one by one, too; not with `cpu_experts`."""
    cpu_experts: CpuExperts | None = None
    """The routed experts are in main memory, and the card holds those that it has room for; who
    computes the others, as `EngineOptions.cpu_experts`. None: all are on the card."""
    expert_threads: int | None = None
    """CPU threads for them; None takes the physical cores."""
    predict: bool = False
    """Say before measuring what the links of the machine let expect; they are measured first, for
    some seconds, unless they are given."""

    def __post_init__(self) -> None:
        if self.experts not in EXPERT_TYPES:
            kinds = ", ".join(EXPERT_TYPES)
            raise ConfigError(f"experts must be one of {kinds}, found {self.experts!r}")
        least = {"generate": 0, "repeat": 1}
        least |= {n: 1 for n in ("vram_bytes", "expert_threads") if getattr(self, n) is not None}
        if self.cpu_experts not in (None, "auto", "on", "off"):
            raise ConfigError(f"cpu_experts must be auto, on or off, found {self.cpu_experts!r}")
        if self.kernels and self.cpu_experts is not None:
            raise ConfigError("kernels are measured one by one only without cpu_experts")
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be >= {low}, found {getattr(self, name)}")
        if any(tokens < 1 for tokens in self.prompts):
            raise ConfigError(f"prompts must be numbers >= 1, found {self.prompts}")
        if self.depths is not None and (not self.depths or min(self.depths) < 0):
            raise ConfigError(f"depths must be one or more numbers >= 0, found {self.depths}")
        if not self.prompts and not self.generate:
            raise ConfigError("no prompts and nothing to generate, so there is nothing to measure")

    @property
    def _decoded(self) -> int:
        """Tokens that a decode adds to its depth at most."""
        return max(self.generate, WARM_UPS, PROFILED_TOKENS) if self.generate else 0

    def depths_in(self, config: ModelConfig) -> tuple[int, ...]:
        """Depths at which decode is measured.

        Raises:
            ConfigError: one of them is beyond the context.
        """
        if not self.generate:
            return ()
        last = config.max_context - self._decoded
        if self.depths is None:
            return (*(depth for depth in DEPTHS if depth < last), last)
        if max(self.depths) > last:
            raise ConfigError(
                f"depths must be 0..{last:,}, so that {self._decoded} tokens more fit the context"
                f" of {config.max_context:,}; found {max(self.depths):,}"
            )
        return self.depths

    def capacity_in(self, config: ModelConfig) -> int:
        """Tokens that a timeline must hold.

        Raises:
            ConfigError: more than the context.
        """
        longest = max(self.prompts, default=0)
        if longest > config.max_context:
            raise ConfigError(f"prompts must be 1..{config.max_context:,}, found {longest:,}")
        return max(longest, *(depth + self._decoded for depth in self.depths_in(config)), 1)
