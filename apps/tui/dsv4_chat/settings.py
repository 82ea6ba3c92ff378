"""Settings: one frozen record whose fields are the keys of the file, the environment and the flags.

The idea: type, default and documentation of a key stand once, here. `settings_file` reads and
writes it as TOML; the order is built-in < file < environment (`DSV4_CHAT_KEY`) < command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from edgedsv4 import ConfigError, EngineOptions, SamplingOptions

SnapshotPolicy = Literal["auto", "off"]
_MODES: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
_CHOICES: Final = {
    "profile": ("default", "exact"),
    "backend": ("auto", "native", "reference", "triton"),
    "snapshots": ("auto", "off"),
    # Those of `themes`, which needs Textual; a test compares.
    "theme": ("dark", "light", "contrast"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a user can set once and for all.

    Raises:
        ConfigError: a value out of its range; `name` is the key.
    """

    model: str = "pocket-v4"
    """Model to open: path of a GGUF file, a checkpoint directory, or a shipped name."""
    device: str = "auto"
    """Where it runs: auto, cpu, or a torch device such as cuda:0."""
    backend: str = "auto"
    """Implementation that computes: auto, native, reference or triton."""
    profile: str = "default"
    """Precision: default (rows and activations as small as the model allows) or exact."""
    context: int = 0
    """Tokens a conversation can hold; 0 takes the model's own limit, 32768 or what memory holds."""
    threads: int = 0
    """CPU threads; 0 takes the physical cores."""
    draft: int = 0
    """Tokens that the MTP block drafts ahead of each step, 0..8."""

    system: str = ""
    """System message of new conversations; empty for none."""
    think: str = "high"
    """Thinking mode of new conversations: none, low, high, max or a number 1..100, as the model
    has it."""
    temperature: float = 1.0
    """Sampling temperature, 0..100; 0 always takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, above 0 and at most 1."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest one's probability, 0..1."""
    repetition_penalty: float = 1.0
    """Makes tokens seen before less likely, above 0 and at most 100; 1 does nothing."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token generated before, -100..100."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of a token generated before, -100..100."""
    seed: int = -1
    """Seed of every reply, 0 or more: same text again; -1 draws a new one each time."""
    max_tokens: int = 0
    """Tokens of a reply at most; 0 means until the context is full."""

    theme: str = "dark"
    """Colours: dark, light or contrast."""
    show_thinking: bool = True
    """Show thinking unfolded while it streams."""
    mouse: bool = True
    """React to the mouse; off leaves it to the terminal, to select text."""
    paste_lines: int = 8
    """A paste of more lines becomes a placeholder in the prompt; it is sent in full. 1 or more."""
    paste_characters: int = 1000
    """A paste of more characters becomes a placeholder too. 1 or more."""
    history: int = 500
    """Earlier prompts that Up and Down go through, 0..100000."""
    editor: str = ""
    """Command of the external editor; empty takes VISUAL, EDITOR or vi."""

    data_folder: str = ""
    """Where conversations are kept; empty takes the user's data folder of the system."""
    snapshots: SnapshotPolicy = "auto"
    """auto keeps evaluated conversations on disk, so that they go on at once; off keeps text."""
    snapshot_gigabytes: float = 2.0
    """Disk that those may take, 0 or more; the ones used least recently are removed first."""
    log_file: str = ""
    """File for the program's log, without prompts and replies; empty for none."""

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            value = getattr(self, key)
            if value not in choices:
                raise ConfigError(
                    f"{key} must be one of {', '.join(choices)}, found {value!r}", name=key
                )
        self._check_numbers()
        thinking = self.thinking
        if thinking not in _MODES and not (isinstance(thinking, int) and 1 <= thinking <= 100):
            expected = f"{', '.join(_MODES)} or 1..100"
            raise ConfigError(f"think must be {expected}, found {self.think!r}", name="think")
        if not self.model:
            raise ConfigError("model must be a path or a name, found ''", name="model")
        self.engine_options()
        self.sampling_options()

    def _check_numbers(self) -> None:
        bounds: dict[str, tuple[float, float, str]] = {
            "context": (0, 1 << 24, "0..2^24"),
            "threads": (0, 1024, "0..1024"),
            "seed": (-1, (1 << 63) - 1, "-1..2^63-1"),
            "max_tokens": (0, 1 << 24, "0..2^24"),
            "paste_lines": (1, math.inf, "1 or more"),
            "paste_characters": (1, math.inf, "1 or more"),
            "history": (0, 100_000, "0..100000"),
            "snapshot_gigabytes": (0, 1 << 20, "0..2^20"),
        }
        for key, (low, high, expected) in bounds.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise ConfigError(f"{key} must be {expected}, found {value}", name=key)

    def engine_options(self) -> EngineOptions:
        """How to open the model."""
        return EngineOptions(
            device=self.device,
            context=self.context or None,
            threads=self.threads or None,
            profile=self.profile,  # type: ignore[arg-type]  # checked against _CHOICES
            backend=self.backend,  # type: ignore[arg-type]  # checked against _CHOICES
            draft=self.draft,
        )

    def sampling_options(self) -> SamplingOptions:
        """How new conversations sample."""
        return SamplingOptions(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed < 0 else self.seed,
            max_tokens=self.max_tokens or None,
        )

    @property
    def thinking(self) -> str | int:
        """`think` as `PromptOptions.thinking` takes it."""
        return int(self.think) if self.think.isascii() and self.think.isdigit() else self.think
