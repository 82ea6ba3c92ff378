"""The models that can be opened by name: which there are, where they lie, what to say of them.

`pocket-v4` is a trained file beside this package; `random-tiny` is built anew for each opening.
Everything that takes a model goes through `open_model`, so a name means the same everywhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.formats.checkpoint import Checkpoint, attach_draft, open_checkpoint
from edgedsv4.runtime.random_model import build_random_model


@dataclass(frozen=True, slots=True)
class ShippedModel:
    """What a user should know of a model that comes with the program."""

    note: str
    """One line: what it is and what to expect of it."""
    prompts: tuple[str, ...] = ()
    """Examples of what it is good at."""


POCKET_V4: Final = "pocket-v4"
RANDOM_TINY: Final = "random-tiny"
DEFAULT_MODEL: Final = POCKET_V4
"""What a conversation opens when no model is named."""
SHIPPED_MODELS: Final[Mapping[str, ShippedModel]] = MappingProxyType(
    {
        POCKET_V4: ShippedModel(
            note=(
                "pocket-v4 is a small demo model (23M parameters): it knows simple stories, word"
                " meanings, small sums and recall, and little else"
            ),
            prompts=(
                # In an order that also works as one conversation.
                "What does river mean?",
                "What is 12 + 7?",
                "Tell me a story about a fox named Mia.",
            ),
        ),
        RANDOM_TINY: ShippedModel(
            note=(
                "random-tiny has seeded random weights: its replies are random characters; name a"
                " model file for real text"
            )
        ),
    }
)
"""By the name that is given in place of a path."""

DEFAULT_OPTIONS: Final = EngineOptions()
_DATA = Path(__file__).resolve().parent.parent / "data"


@contextmanager
def model_path(model: str | Path) -> Iterator[Path]:
    """The path of a model, given as path or as the name of a shipped model.

    The random model is built in a new directory that only this user can enter (nobody else can put
    a file or a link in its way), and removed when the context ends.

    Raises:
        ConfigError: an empty name.
    """
    name = str(model)
    if not name:
        # As a path it would mean the working directory.
        raise ConfigError(f"the model's name is empty; give a path or {', '.join(SHIPPED_MODELS)}")
    if name == RANDOM_TINY:
        with tempfile.TemporaryDirectory(prefix="edgedsv4-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / f"{name}.gguf"
            build_random_model(path)
            yield path
    elif name in SHIPPED_MODELS:
        yield _DATA / name / f"{name}.gguf"
    else:
        yield Path(model)


@contextmanager
def open_model(model: str | Path, options: EngineOptions = DEFAULT_OPTIONS) -> Iterator[Checkpoint]:
    """Open a model's headers; a shipped model comes with the MTP block from the file beside it.

    Args:
        model: path or shipped name.
        options: `draft_model` names a file with the MTP block of another model; with `draft` there
            has to be a block. `dense_model` goes with an expert pack.

    Raises:
        ConfigError: an empty name, drafts are asked for and there is no MTP block, or `dense_model`
            is given and the model is no expert pack.
        FormatError: missing, damaged, of another format, or contradicting itself.
        UnsupportedModelError: an architecture or a kind of file that cannot be run.
    """
    with model_path(model) as path, ExitStack() as files:
        dense = None if options.dense_model is None else Path(options.dense_model)
        checkpoint = files.enter_context(open_checkpoint(path, dense=dense))
        beside = path.with_name(f"mtp-{path.name}")
        draft = options.draft_model
        if draft is None and str(model) in SHIPPED_MODELS and beside.is_file():
            draft = beside
        if draft is not None:
            checkpoint = files.enter_context(attach_draft(checkpoint, Path(draft)))
        if options.draft and not checkpoint.config.num_draft_layers:
            hint = f" ({beside.name} lies beside it)" if beside.is_file() else ""
            raise ConfigError(
                f"draft is {options.draft}, but {path} holds no MTP block{hint}; name the file"
                " with the block as draft_model (--draft-model), or leave draft at 0"
            )
        yield checkpoint
