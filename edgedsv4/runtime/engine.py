"""An engine: one opened model with its tokenizer and memory budget, which makes sessions.

Opening goes from cheap to dear, so that what cannot work fails early: device and backend, header,
weight table, memory plan, and only then weights. The weights stay in the mapped file; the engine
compares the file with what it opened before every chunk.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import torch

from edgedsv4.config import EngineOptions
from edgedsv4.errors import BusyError, ConfigError, Dsv4Error
from edgedsv4.formats.sigbus import install_guard
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.backends import BackendChoice, check_backend, load_model
from edgedsv4.runtime.device import engine_device, resident_bytes
from edgedsv4.runtime.engine_plan import plan_of_engine
from edgedsv4.runtime.expert_facts import expert_facts, expert_stats
from edgedsv4.runtime.gpu_devices import device_memory_errors
from edgedsv4.runtime.memory_plan import (
    EXPERTS,
    MemoryPlan,
    StateLayout,
    device_workspace_bytes,
    plan_memory,
    workspace_bytes,
)
from edgedsv4.runtime.opening import notes_of, place, tokenizer_of, too_large, use_threads
from edgedsv4.runtime.ram_store import ExpertStore
from edgedsv4.runtime.session import Session
from edgedsv4.runtime.session_parts import SessionParts
from edgedsv4.runtime.shipped_models import open_model
from edgedsv4.runtime.snapshot import session_owner
from edgedsv4.runtime.store_plan import BANK
from edgedsv4.runtime.tier_plan import TokenCost
from edgedsv4.runtime.tier_report import report_plan
from edgedsv4.runtime.token_bytes import TokenBytes, cache_read_bytes
from edgedsv4.runtime.verify import verify_weights
from edgedsv4.text.prompt import render_prompt

if TYPE_CHECKING:
    from types import TracebackType

    from edgedsv4.config import ModelConfig
    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.formats.snapshot_file import Source
    from edgedsv4.formats.snapshot_header import SnapshotModel
    from edgedsv4.model.hooks import GuessHook, SelectionHook
    from edgedsv4.model.model import Model
    from edgedsv4.runtime.links import Links
    from edgedsv4.runtime.tier_report import TierReport
    from edgedsv4.runtime.timeline import Progress
    from edgedsv4.text.messages import Message, Prompt
    from edgedsv4.text.prompt import PromptOptions
    from edgedsv4.text.tokenizer import Tokenizer

OpenProgress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What an engine holds until it is closed."""

    checkpoint: Checkpoint
    model: Model
    tokenizer: Tokenizer | None
    plan: MemoryPlan
    weights: dict[str, int]
    """Bytes by item of the memory plan."""
    token_bytes: TokenBytes
    cost: TokenCost
    choice: BackendChoice
    threads: int
    notes: tuple[str, ...]
    files: ExitStack
    owner: Callable[[], SnapshotModel]
    """Which model saved sessions belong to."""


class Engine:
    """An opened model; made by `Engine.open`, closed by `close` or a `with` block.

    Sessions may work in several threads at once. Every method but `close` raises `Dsv4Error` after
    `close`.
    """

    def __init__(self, opened: _Opened, options: EngineOptions) -> None:
        self.options = options
        self._opened: _Opened | None = opened
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    @classmethod
    def open(
        cls,
        model: str | Path,
        options: EngineOptions | None = None,
        *,
        on_progress: OpenProgress | None = None,
    ) -> Engine:
        """Open a model.

        Where torch computes, this sets torch's number of threads, one figure for the whole process.

        Args:
            model: a GGUF file (any part of a split one), an official checkpoint directory, or the
                name of a shipped model (`pocket-v4`, `random-tiny`).
            options: choices for this engine.
            on_progress: told what is being done.

        Raises:
            FormatError: a missing, damaged or unsupported file, or with `options.verify` damaged
                weights.
            ConfigError: a context beyond the model's own, or drafts without an MTP block.
            CapacityError: the memory budget holds neither weights nor one session; nothing was
                allocated.
            BackendUnavailableError: a device or backend that cannot run here.
        """
        options = options or EngineOptions()
        report = on_progress or (lambda _what, _done, _total: None)
        check_backend(options, engine_device(options))
        if options.sigbus_guard:
            install_guard()
        with ExitStack() as stack:
            report("open model", 0, 4)
            checkpoint = stack.enter_context(open_model(model, options))
            bound = bind_weights(checkpoint)
            placement = place(checkpoint, bound, options)
            options, device = placement.options, placement.device
            choice, weights, plan = placement.choice, placement.weights, placement.plan
            report("open model", 1, 4)
            if options.verify:
                verify_weights(bound, checkpoint.path, partial(report, "verify"))
            threads = use_threads(options, weights, choice)
            copying = partial(report, "copy weights")
            with device_memory_errors(f"opening {checkpoint.path}", device):
                network = load_model(bound, options, device, choice, threads, on_progress=copying)
            if isinstance(network.experts, ExpertStore):
                stack.callback(network.experts.close)
            stack.callback(network.close)  # first, since it uses the experts
            report("open model", 3, 4)
            tokenizer = tokenizer_of(checkpoint)
            report("open model", 4, 4)
            opened = _Opened(
                checkpoint=checkpoint,
                model=network,
                tokenizer=tokenizer,
                plan=plan,
                weights=weights,
                token_bytes=TokenBytes.of(bound),
                cost=TokenCost.of(bound),
                choice=choice,
                threads=threads,
                notes=notes_of(model, checkpoint, (*bound.warnings, *placement.notes), placement),
                files=stack.pop_all(),
                owner=cache(partial(session_owner, checkpoint, tokenizer)),
            )
        return cls(opened, options)

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self._live.checkpoint.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model has none, so only token ids can be used.
        """
        tokenizer = self._live.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"{self._live.checkpoint.path} holds no tokenizer, only token ids can be used"
            )
        return tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer; without one only token ids can be used."""
        return self._live.tokenizer is not None

    @property
    def variant(self) -> str:
        """Prompt encoding of the model: `v4` or `v4-0731`."""
        return self._live.checkpoint.encoding_hint

    @property
    def context(self) -> int:
        """Tokens a new session holds when nothing else is asked for."""
        return self._live.plan.context

    def new_session(
        self,
        *,
        context: int | None = None,
        on_experts: SelectionHook | None = None,
        on_guesses: GuessHook | None = None,
    ) -> Session:
        """Make a session.

        Args:
            context: tokens it can hold; None takes `self.context`.
            on_experts: called at every layer with (layer, selection scores [T, E], expert ids
                [T, k]), returns the ids to use; for watching the routing, and slower than without.
            on_guesses: called before that with (layer, expert ids [T, 8]) that the layer's router
                guesses one layer earlier, the likeliest first; on the CPU, for layers that route by
                score, but for the first.

        Raises:
            ConfigError: less than one token, or more than the model was made for.
            CapacityError: it does not fit beside the weights and the live sessions; nothing was
                allocated.
        """
        with self._lock:
            opened = self._live
            capacity = self.context if context is None else context
            limit = opened.checkpoint.config.max_context
            if not 1 <= capacity <= limit:
                raise ConfigError(f"context must be 1..{limit} for this model, found {capacity}")
            self._check_room(opened, capacity)
            with device_memory_errors("a session", opened.model.numerics.device):
                parts = replace(self._parts(opened), on_experts=on_experts, on_guesses=on_guesses)
                session = Session(parts, capacity)
            self._sessions.add(session)
            return session

    def load_session(
        self, source: Source, *, context: int | None = None, on_progress: Progress | None = None
    ) -> Session:
        """Make a session of a saved one.

        Args:
            source: path of what `Session.save` wrote, or the bytes of `Session.save_bytes`.
            context: tokens it can hold, no matter how many the saved one could; None takes
                `self.context`.
            on_progress: told (done, total) in bytes; whatever it raises ends the loading.

        Raises:
            SnapshotError: damaged, or of another model, tokenizer, profile or dtype.
            ContextFullError: it has more tokens than `context`.
            StorageError: the file is missing or cannot be read.
            ConfigError, CapacityError: as `new_session`.
        """
        session = self.new_session(context=context)
        try:
            session.load(source, on_progress=on_progress)
        except BaseException:
            session.close()
            raise
        return session

    def hash_tables(self) -> dict[int, npt.NDArray[np.int64]]:
        """Expert ids by token id, [V, k], of every layer that routes by a table."""
        layers = enumerate(self._live.model.weights.layers)
        tables = {layer: weights.moe.expert_table for layer, weights in layers}
        return {layer: t.cpu().numpy() for layer, t in tables.items() if t is not None}

    def render(self, messages: Sequence[Message], options: PromptOptions | None = None) -> Prompt:
        """The exact prompt of a conversation; `tokenizer.encode_pieces(prompt.pieces)` is its ids.

        Raises:
            ConfigError: a conversation or option that the model's encoding cannot express.
        """
        return render_prompt(messages, variant=self.variant, options=options)

    def describe(self) -> dict[str, object]:
        """What was opened and how it runs, as JSON types.

        `threads` is the engine's own figure; where torch computes, torch's for the whole process.
        `kernels` names the implementation of each operation, `instruction_set` the CPU instructions
        of the native ones (None where torch computes). `notes` holds everything a user should know:
        warnings of the file, what stands in for something else, what is left out.
        """
        opened = self._live
        is_native = opened.choice.name == "native"
        checkpoint, options = opened.checkpoint, self.options
        return {
            "model": checkpoint.name,
            "path": str(checkpoint.path),
            "kind": checkpoint.kind,
            "identity_sha256": checkpoint.identity_sha256,
            "architecture": checkpoint.config.architecture,
            "variant": self.variant,
            "device": str(opened.model.numerics.device),
            "threads": opened.threads if is_native else torch.get_num_threads(),
            "backend": options.backend,
            "profile": options.profile,
            "dtype": options.dtype,
            "context": self.context,
            "prefill_chunk": options.chunk,
            "experts": expert_facts(opened.model, opened.choice),
            "draft": options.draft,
            "cpu_experts": options.cpu_experts,
            "kernels": opened.choice.kernels(),
            "instruction_set": opened.choice.instruction_set,
            "notes": list(opened.notes),
        }

    def memory(self) -> dict[str, int]:
        """Bytes by item.

        `mapped_weights` and `mapped_experts` are the file's and belong to the system's cache;
        `expert_bank` is what a store of experts takes, and 0 where they are mapped.
        `kv_used` is the part of `kv_allocated` that live sessions have filled, what drafts need
        included; `workspace` is what one evaluation may take at most, by the memory plan.
        """
        opened = self._live
        layout = self._layout(opened)
        sessions = self._known_sessions()
        usages = [usage for session in sessions if (usage := session.usage()) is not None]
        store = opened.choice.store
        bank = 0 if store is None else store.nbytes
        here = bank if BANK in opened.weights else 0  # beside a card it is in other memory
        return {
            "mapped_weights": sum(opened.weights.values()) - opened.weights.get(EXPERTS, 0) - here,
            "mapped_experts": opened.weights.get(EXPERTS, 0) if store is None else 0,
            "expert_bank": bank,
            "resident_weights": resident_bytes(opened.model.weights),
            "sessions": len(usages),
            "kv_allocated": sum(layout.state_bytes(capacity) for _, capacity in usages),
            "kv_used": sum(layout.state_bytes(length) for length, _ in usages),
            "checkpoints": sum(session.checkpoint_nbytes() for session in sessions),
            "workspace": self._workspace(opened),
            "budget": opened.plan.available_bytes,
        }

    def bytes_per_token(self, depth: int = 0) -> dict[str, int]:
        """Bytes that decoding one token has to read, which bound its speed on a CPU.

        `dense_weights` counts every weight but the routed experts, of which `expert_weights` counts
        those that one token uses; `kv` is what is read of the cache after `depth` tokens.

        Raises:
            ConfigError: a negative depth.
        """
        if depth < 0:
            raise ConfigError(f"depth must be >= 0, found {depth}")
        opened = self._live
        return {
            "dense_weights": opened.token_bytes.dense_weights,
            "expert_weights": opened.token_bytes.expert_weights,
            "kv": cache_read_bytes(self._layout(opened), depth),
        }

    def expected_speed(self, links: Links) -> TierReport:
        """What the links of this machine let expect of the engine as it was opened.

        Where experts lie is what the engine was given, not what a plan would choose now.

        Args:
            links: what was measured of the machine.

        Returns:
            A report without a prediction where figures are missing, or torch computes.
        """
        opened = self._live
        plan = plan_of_engine(
            opened.checkpoint.config,
            opened.cost,
            self.options,
            opened.plan,
            opened.choice,
            opened.weights,
        )
        found = report_plan(plan, links, links.drive_of(opened.checkpoint.path))
        if opened.choice.name == "reference":
            return replace(found, prediction=None, missing=("torch's operations",), advice=())
        return found

    def close(self) -> None:
        """Give files and memory back. Closing twice is fine.

        Raises:
            BusyError: sessions are still open; close them first. A `with` block closes them itself.
        """
        with self._lock:
            live = [session for session in tuple(self._sessions) if not session.is_closed]
            if live:
                raise BusyError(f"{len(live)} sessions of this engine are open; close them first")
            if self._opened is not None:
                files, self._opened = self._opened.files, None
                files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in self._known_sessions():
            session.close()
        self.close()

    def _known_sessions(self) -> tuple[Session, ...]:
        """Sessions made so far and still referred to; the set may only be walked under the lock."""
        with self._lock:
            return tuple(self._sessions)

    @property
    def _live(self) -> _Opened:
        if self._opened is None:
            raise Dsv4Error("this engine is closed; open the model again")
        return self._opened

    def _parts(self, opened: _Opened) -> SessionParts:
        return SessionParts(
            model=opened.model,
            tokenizer=opened.tokenizer,
            variant=opened.checkpoint.encoding_hint,
            options=self.options,
            render=self.render,
            check_files=opened.checkpoint.check_unchanged,
            owner=opened.owner,
            check_room=self._check_more,
            backend=opened.choice.name,
            expert_stats=partial(expert_stats, opened.model),
        )

    def _check_more(self, tokens: int) -> None:
        with self._lock:
            self._check_room(self._live, tokens)

    def _layout(self, opened: _Opened) -> StateLayout:
        options = self.options
        return StateLayout(opened.checkpoint.config, options.profile, options.dtype, options.draft)

    def _workspace(self, opened: _Opened) -> int:
        config, options = opened.checkpoint.config, self.options
        if opened.choice.name == "triton":
            return device_workspace_bytes(config, options.chunk, options.profile)
        return workspace_bytes(config, options.chunk, options.dtype)

    def _check_room(self, opened: _Opened, capacity: int) -> None:
        plan = plan_memory(
            opened.checkpoint.config,
            opened.weights,
            self.options,
            available_bytes=opened.plan.available_bytes,
            context=capacity,
            on_gpu=opened.choice.name == "triton",
        )
        layout = self._layout(opened)
        others = sum(
            layout.state_bytes(usage[1]) + session.checkpoint_nbytes()
            for session in tuple(self._sessions)
            if (usage := session.usage()) is not None
        )
        if plan.needed_bytes + others > plan.available_bytes:
            what, is_on_gpu = f"a session of {capacity:,} tokens", opened.choice.name == "triton"
            raise too_large(what, plan, others, is_on_device=is_on_gpu)
