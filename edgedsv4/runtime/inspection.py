"""Answers from the header of a model file: what it holds, what it takes, how it tokenizes.

Nothing here imports torch or reads a weight, so the answers come at once for a file of any size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.model.weight_table import WeightLine, bind_weights, weight_report
from edgedsv4.runtime.host import available_ram_bytes
from edgedsv4.runtime.memory_plan import MemoryPlan, plan_memory, weight_items
from edgedsv4.runtime.shipped_models import open_model
from edgedsv4.runtime.store_plan import plan_store, store_obstacle
from edgedsv4.text.prompt import Prompt, PromptOptions, render_prompt
from edgedsv4.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.text.chat_json import Chat

_SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "vocab_size",
    "num_heads",
    "head_dim",
    "window",
    "index_topk",
    "num_experts",
    "experts_per_token",
    "num_hash_layers",
    "num_draft_layers",
    "max_context",
    "compress_ratios",
)


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """The weights of one role, over all layers."""

    name: str
    tensors: int
    nbytes: int
    block_types: dict[str, int]
    """Storage type -> number of weights stored so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What the header of a model says."""

    path: Path
    kind: str
    """`gguf` or `official`; of an expert pack, what its other file is."""
    name: str
    variant: str
    """Prompt encoding."""
    identity_sha256: str
    config: ModelConfig
    tokenizer: dict[str, object]
    dense_path: Path | None
    """Where an expert pack's other file is; None for models that are no pack."""
    roles: tuple[RoleSummary, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    """Why it cannot run; empty when it can."""

    def facts(self) -> dict[str, object]:
        """The short answers, in the order they are printed."""
        facts: dict[str, object] = {
            "file": self.path,
            "kind": self.kind,
            **({} if self.dense_path is None else {"rest of the model": self.dense_path}),
            "name": self.name,
            "architecture": self.config.architecture,
            "prompt encoding": self.variant,
            "identity": self.identity_sha256,
        }
        facts |= {name.replace("_", " "): getattr(self.config, name) for name in _SHAPE_FIELDS}
        facts |= {f"tokenizer {name}": value for name, value in self.tokenizer.items()}
        return facts

    def to_json(self) -> dict[str, object]:
        """Everything as JSON types; an infinite clamp is null."""
        config = dataclasses.asdict(self.config)
        for name in ("swiglu_limits", "shared_swiglu_limits"):
            config[name] = [v if v < float("inf") else None for v in config[name]]
        return {
            "path": str(self.path),
            "kind": self.kind,
            "dense_path": None if self.dense_path is None else str(self.dense_path),
            "name": self.name,
            "variant": self.variant,
            "identity_sha256": self.identity_sha256,
            "config": config,
            "tokenizer": self.tokenizer,
            "roles": [dataclasses.asdict(role) for role in self.roles],
            "warnings": list(self.warnings),
            "problems": list(self.problems),
        }


class ModelText:
    """The text side of a model: its tokenizer and its prompt encoding."""

    def __init__(self, tokenizer: Tokenizer, variant: str) -> None:
        self.tokenizer = tokenizer
        self.variant = variant

    def render(self, chat: Chat, options: PromptOptions | None = None) -> Prompt:
        """Renders a conversation; what the chat says of tools and schemas goes before `options`."""
        chosen = dataclasses.replace(
            options or PromptOptions(),
            tools=chat.tools,
            response_format=chat.response_format,
            tool_choice=chat.tool_choice,
        )
        return render_prompt(chat.messages, variant=self.variant, options=chosen)


def inspect_model(model: str | Path, *, dense_model: str | Path | None = None) -> Inspection:
    """Reads the header of a model and checks it whole.

    Args:
        model: path or shipped name.
        dense_model: as in `EngineOptions`.

    Raises:
        FormatError: when the header itself cannot be read; a header that reads well but cannot run
            is an answer, with `problems`.
    """
    with open_model(model, EngineOptions(dense_model=dense_model)) as checkpoint:
        problems: tuple[str, ...] = ()
        try:
            lines = weight_report(checkpoint)
        except FormatError as error:
            problems = error.problems
            lines = [
                WeightLine(name, name, record.block_type.name, record.nbytes)
                for name, record in checkpoint.tensors.items()
            ]
        return Inspection(
            path=checkpoint.path,
            kind=checkpoint.kind,
            name=checkpoint.name,
            variant=checkpoint.encoding_hint,
            identity_sha256=checkpoint.identity_sha256,
            config=checkpoint.config,
            tokenizer=_tokenizer_facts(checkpoint),
            dense_path=checkpoint.dense_path,
            roles=tuple(_summaries(lines)),
            warnings=tuple(checkpoint.warnings),
            problems=problems,
        )


def plan_model(model: str | Path, options: EngineOptions) -> MemoryPlan:
    """Plans the memory of one session of `options.context` tokens, without a look at the weights.

    The budget is `options.ram_bytes`, which may be that of another machine; None takes this one's.

    Raises:
        FormatError: when the header cannot be read or its tensors do not fit the configuration.
        ConfigError: when the context is beyond the model's own, or drafts are asked for and there
            is no MTP block.
        CapacityError: a store is needed, and cannot be as large as `expert_ram_bytes` says.
    """
    with open_model(model, options) as checkpoint:
        sizes = [(line.role, line.nbytes) for line in weight_report(checkpoint)]
        config = checkpoint.config
        if options.context is not None and options.context > config.max_context:
            raise ConfigError(
                f"context must be 1..{config.max_context} for {checkpoint.path},"
                f" found {options.context}"
            )
        budget = options.ram_bytes or available_ram_bytes()
        weights = weight_items(sizes)
        plan = plan_memory(
            config, weights, options, available_bytes=budget, context=options.context
        )
        experts = bind_weights(checkpoint).experts
        is_needed = not plan.experts_fit and store_obstacle(experts) is None
        wanted = options.expert_place
        if wanted == "stored" or (wanted == "auto" and is_needed):
            stored = plan_store(config, weights, options, experts, budget)[1]
            plan = stored if stored.fits or wanted == "stored" else plan
        return plan


@contextmanager
def open_text(model: str | Path) -> Iterator[ModelText]:
    """Opens the tokenizer and prompt encoding of a model.

    Raises:
        FormatError: when the header or the tokenizer cannot be read.
        ConfigError: when the model has no tokenizer.
    """
    with open_model(model) as checkpoint:
        yield ModelText(_tokenizer(checkpoint), checkpoint.encoding_hint)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    source = checkpoint.tokenizer
    if source is None:
        raise ConfigError(f"{checkpoint.path}: the model has no tokenizer; only ids can be used")
    if isinstance(source, Path):
        return Tokenizer.from_json(source, vocab_size=checkpoint.config.vocab_size)
    return Tokenizer.from_spec(source)


def _tokenizer_facts(checkpoint: Checkpoint) -> dict[str, object]:
    source = checkpoint.tokenizer
    if source is None:
        return {"kind": "none"}
    if isinstance(source, Path):
        return {"kind": source.name}
    return {
        "kind": source.pre or "DeepSeek-V4",
        "tokens": len(source.tokens),
        "merges": len(source.merges),
        "bos": source.bos_id,
        "eos": source.eos_id,
    }


def _summaries(lines: Iterable[WeightLine]) -> Iterator[RoleSummary]:
    """Sums weights up by role, in the order of the memory plan."""
    by_role: dict[str, list[WeightLine]] = {}
    for line in lines:
        role = next(iter(weight_items([(line.role, 1)])))
        by_role.setdefault(role, []).append(line)
    for role, members in sorted(by_role.items()):
        yield RoleSummary(
            role,
            len(members),
            sum(line.nbytes for line in members),
            dict(Counter(line.block_type for line in members)),
        )
