"""The routed experts that the CPU computes for a model on a GPU, by the C kernels.

Python makes the records once; what is computed for a token is one call of C (`dk_host_experts`)
per layer, which needs no Python. So a GPU's stream can make it by itself, in the middle of a
captured step. What goes to the CPU and back goes through page-locked memory at fixed addresses.

Experts that come and go (a `WatchedStream`): the records are a table of those in memory, and a call
that finds all it needs there asks nobody. Else it waits at a desk, whose thread computes what is
there, then each expert as it arrives. Sums have the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.errors import (
    CancelledError,
    ConfigError,
    ExpertReadError,
    NumericError,
)
from edgedsv4.kernels.native.library import fill_matrix, library, new_run, pointer
from edgedsv4.model.expert_desk import ExpertDesk
from edgedsv4.model.moe import (
    WatchedStream,
    foresight_of,
    guess_by_router,
    likeliest_first,
    stream_of,
)
from edgedsv4.model.native_model import DK_SMALL_TOKENS
from edgedsv4.model.native_network import DescribedExperts

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.moe import ExpertSource
    from edgedsv4.model.weights import ExpertWeights, MoeWeights

_ALIGNMENT = 64
_LINGER_NS = 400_000
"""Workers look for the next layer's job so long: what a GPU does in between takes 100 us."""
_WORDS = 4
"""Lists of a step begin at multiples of so many words."""
_NO_EXPERT, _STOPPED = 1, 3  # why a job failed, besides weights that are not there


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetting:
    """How the CPU computes."""

    threads: int
    """That work, at least 1."""
    has_int8: bool
    """Activations are rounded to int8 where the types allow, as in the profile `default`."""
    is_pinned: bool = False
    """Each thread keeps to one CPU."""
    is_locked: bool = False
    """Memory that a GPU copies from and to is page-locked."""


@dataclass(frozen=True, slots=True)
class HostCounts:
    """What was computed so far."""

    calls: int
    """Layers of steps and chunks."""
    experts: int
    """Pairs of a token and an expert."""
    left: int
    """Experts that were left to the card, in steps."""
    computed: int
    """Experts that steps computed."""
    seconds: float
    """Spent in them."""


def step_words(hidden: int, k: int) -> tuple[int, int, int]:
    """Where in a step's memory, in words: weights, ids, end. x comes first."""
    weights = -(-hidden // _WORDS) * _WORDS
    width = -(-k // _WORDS) * _WORDS
    return weights, weights + width, weights + 2 * width


class StepMemory:
    """x, weights and ids of one token in one piece of memory, so that one copy moves them."""

    def __init__(self, hidden: int, k: int, memory: Tensor) -> None:
        weights, ids, _ = step_words(hidden, k)
        self.whole = memory
        """[words] float32."""
        self.x = memory[:hidden].view(1, hidden)
        self.weights = memory[weights : weights + k].view(1, k)
        self.ids = memory[ids : ids + k].view(torch.int32).view(1, k)


class ChunkMemory:
    """Page-locked memory of the tokens of a small chunk."""

    def __init__(self, tokens: int, hidden: int, k: int, *, is_locked: bool) -> None:
        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, pin_memory=is_locked)

        self.tokens = tokens
        self.x, self.out = floats(tokens, hidden), floats(tokens, hidden)
        self.weights = floats(tokens, k)
        self.ids = torch.empty((tokens, k), dtype=torch.int32, pin_memory=is_locked)


class HostExperts:
    """Computes the experts that are not on the card.

    Args:
        config: shape of the model.
        limits: clamp of each layer, an MTP block's last.
        source: of the experts. A resident one is asked now for all that the CPU may need.
        places: of each layer, int32 [E], negative where the CPU computes; None: everywhere.
        setting: threads and precision.
        routers: of all layers, to guess what the next layer asks for while one waits.

    Raises:
        BackendUnavailableError: the C kernels are not built, or cannot read a weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        limits: Sequence[float],
        source: ExpertSource,
        places: Sequence[Tensor | None],
        setting: HostSetting,
        routers: Sequence[MoeWeights] = (),
    ) -> None:
        lib, ffi = library()
        self._config = config
        self._source = source
        self._stream = stream_of(source)
        self._foresight = foresight_of(source)
        self._routers = routers
        self._described = DescribedExperts()
        self._passing = ffi.new("dk_matrix[]", 3 * config.num_experts)
        self._error: BaseException | None = None
        self._check_stop: Callable[[], None] = _go_on
        self._places = tuple(places)
        self._setting = setting
        self._run = new_run(setting.threads, is_pinned=setting.is_pinned)
        # Called by a thread of the GPU's runtime there is no Python to ask whether to stop.
        self._run.cdata.poll = ffi.NULL
        self._run.cdata.linger_ns = _LINGER_NS
        self._kept: list[Sequence[ExpertWeights]] = []
        self._records = [ffi.new("dk_matrix[]", 3 * config.num_experts) for _ in limits]
        self._layers = ffi.new("dk_experts[]", len(limits))
        for layer, limit in enumerate(limits):
            self._fill_layer(self._layers[layer], layer, limit)
        hidden, k = config.hidden_size, config.experts_per_token
        words, is_locked = step_words(hidden, k)[2], setting.is_locked
        self.step = StepMemory(hidden, k, torch.zeros(words, pin_memory=is_locked))
        """What the GPU writes before a layer's call."""
        self.step_out = torch.zeros((1, hidden), pin_memory=is_locked)
        """[1, D] what the call leaves."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._step_scratch = self._aligned(lib.dk_host_experts_bytes(self._layers, 1))
        self._jobs = ffi.new("dk_host_job[]", len(limits) + 1)
        self._found = torch.full((len(limits), k), -1, dtype=torch.int32)
        self.seen = torch.full((len(limits), k), -1, dtype=torch.int32)
        """[layers, k] ids that the last step chose, also those that the card computed."""
        for layer in range(len(limits)):
            self._fill_job(self._jobs[layer], layer)
            self._set_step(self._jobs[layer])
            self._jobs[layer].seen = pointer(self.seen[layer])
        self._chunk: ChunkMemory | None = None
        self._desk: ExpertDesk | None = None
        if isinstance(source, WatchedStream):
            source.watch(self)
            self._open_desk()

    def _open_desk(self) -> None:
        self._desk = ExpertDesk(self._serve)
        for layer, found in enumerate(self._found):
            self._jobs[layer].desk = self._desk.cdata
            self._jobs[layer].found = pointer(found)

    def close(self) -> None:
        """End the thread that brings experts, once no step is under way."""
        if self._desk is not None:
            self._desk.close()

    @property
    def function(self) -> int:
        """Address of the C function that computes a layer of a step."""
        lib, ffi = library()
        return int(ffi.cast("intptr_t", ffi.addressof(lib, "dk_host_experts")))

    def job(self, layer: int) -> int:
        """Address of the argument of `function` for a layer; it stays as long as this object."""
        _, ffi = library()
        return int(ffi.cast("intptr_t", self._jobs + layer))

    @property
    def is_free_running(self) -> bool:
        """Whether no layer of a step needs the thread that launches it."""
        return self._source.is_resident or self._desk is not None

    def own(self, layer: int) -> list[int]:
        """Experts of a layer that are computed here, ascending."""
        places, every = self._places[layer], range(self._config.num_experts)
        return list(every) if places is None else [e for e in every if int(places[e]) < 0]

    def take_over(self, layer: int, expert_id: int) -> None:
        """Compute an expert that lived on the card, and is asked for here from now on."""
        if self._source.is_resident:
            self._describe(layer, [expert_id], self._source.fetch(layer, [expert_id]))

    def begin(self, check_stop: Callable[[], None] | None = None) -> None:
        """Before a step: one token, whose rows have the bits of rows in a small chunk.

        Args:
            check_stop: called every now and then while experts are waited for, by any thread;
                raises to stop.
        """
        self.forget_failures()
        self._check_stop = check_stop or _go_on
        self._run.cdata.is_small = 1
        self._run.cdata.bad = 0

    def run_step(self, layer: int) -> None:
        """Compute a layer of a step in the calling thread, from `step` to `step_out`.

        Raises:
            ExpertReadError: weights cannot be read.
        """
        lib, _ = library()
        if self._stream is not None:
            self._in_parts(self._jobs + layer, layer, self.step, self._check_stop)
            return
        self._fetch(layer, self.step.ids)
        lib.dk_host_experts(self._jobs + layer)

    def end_step(self) -> None:
        """After a step that ended well: tell the source what was used without asking."""
        if self._desk is None or not isinstance(self._source, WatchedStream):
            return
        pairs = enumerate(self._found.tolist())
        uses = [(layer, own) for layer, ids in pairs if (own := [e for e in ids if e >= 0])]
        self._source.note_used(uses)

    def chunk(self, tokens: int) -> ChunkMemory:
        """Memory of a chunk of so many tokens, the same one as long as they are as many."""
        if self._chunk is None or self._chunk.tokens != tokens:
            lib, _ = library()
            config, is_locked = self._config, self._setting.is_locked
            self._chunk = None
            self._chunk = ChunkMemory(
                tokens, config.hidden_size, config.experts_per_token, is_locked=is_locked
            )
            self._scratch = self._aligned(lib.dk_host_experts_bytes(self._layers, tokens))
        return self._chunk

    def run_chunk(self, layer: int, check_stop: Callable[[], None] | None = None) -> None:
        """Compute a layer of the chunk whose memory is filled, in the calling thread.

        Args:
            layer: of the experts.
            check_stop: called every now and then while experts are waited for; raises to stop.

        Raises:
            ExpertReadError: weights cannot be read.
            NumericError: ids out of range.
        """
        lib, ffi = library()
        memory = self._chunk
        if memory is None:
            raise ConfigError("no chunk was begun")
        job = self._jobs + len(self._places)
        self._fill_job(job, layer)
        job.tokens = memory.tokens
        job.x, job.ids = pointer(memory.x), pointer(memory.ids)
        job.weights, job.out = pointer(memory.weights), pointer(memory.out)
        job.scratch = ffi.cast("void *", self._scratch.data_ptr())
        self._run.cdata.is_small = memory.tokens <= DK_SMALL_TOKENS
        if self._stream is not None:
            self._in_parts(job, layer, memory, check_stop or _go_on)
        else:
            self._fetch(layer, memory.ids)
            lib.dk_host_experts(job)
        self.check()

    def check(self) -> None:
        """Raise what went wrong in a job since this was asked last; further jobs are possible.

        Raises:
            ExpertReadError: an expert's weights were not there.
            NumericError: the router chose an expert that does not exist.
            CancelledError: it was stopped.
        """
        first: tuple[str, int, int] | None = None
        for place in range(len(self._places) + 1):
            job = self._jobs[place]
            failed, expert = job.failed, job.failed_id
            if failed and first is None:
                what = f"layer {place}" if place < len(self._places) else "a chunk"
                first = what, failed, expert
        error = self._error
        self.forget_failures()
        if first is None:
            return
        if error is not None:
            raise error
        what, failed, expert = first
        if failed == _NO_EXPERT:
            raise NumericError(f"{what} chose expert {expert} of {self._config.num_experts}")
        if failed == _STOPPED:
            raise CancelledError(f"the CPU's part of {what} was stopped")
        raise ExpertReadError(f"{what} needed expert {expert}, whose weights are not there")

    def forget_failures(self) -> None:
        """What went wrong in a forward that was interrupted before it asked concerns no other."""
        for place in range(len(self._places) + 1):
            self._jobs[place].failed = 0
        self._run.cdata.stop = 0
        self._error = None

    def counts(self) -> HostCounts:
        """What was computed so far."""
        jobs = [self._jobs[place] for place in range(len(self._places) + 1)]
        return HostCounts(
            calls=sum(job.calls for job in jobs),
            experts=sum(job.computed for job in jobs),
            left=sum(job.left for job in jobs[:-1]),
            computed=sum(job.computed for job in jobs[:-1]),
            seconds=sum(job.ns for job in jobs) / 1e9,
        )

    def layer_seconds(self) -> list[float]:
        """Time in the calls of steps so far, by layer."""
        return [self._jobs[layer].ns / 1e9 for layer in range(len(self._places))]

    # ---- a table of the experts in memory, see `ExpertTable` ----

    def put(self, layer: int, expert_id: int, expert: ExpertWeights) -> None:
        """The CPU may use an expert."""
        self._described.copy_to(self._records[layer] + 3 * expert_id, expert)

    def drop(self, layer: int, expert_id: int) -> None:
        """It may no more."""
        _, ffi = library()
        for place in range(3):
            self._records[layer][3 * expert_id + place].data = ffi.NULL

    def clear(self) -> None:
        """It may use none."""
        _, ffi = library()
        for records in self._records:
            ffi.memmove(records, bytes(ffi.sizeof(records)), ffi.sizeof(records))

    # ---- experts that arrive ----

    def _serve(self, job: Any) -> None:
        """Do the job of an order; for the thread of the desk."""
        lib, _ = library()
        layer = job - self._jobs
        try:
            try:
                self._in_parts(job, layer, self.step, self._check_stop)
            finally:
                if isinstance(self._source, WatchedStream):
                    self._source.let_go()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the stream must go on
            self._error = self._error or error
            lib.dk_host_refuse(job, -1)

    def _in_parts(
        self,
        job: Any,
        layer: int,
        memory: StepMemory | ChunkMemory,
        check_stop: Callable[[], None],
    ) -> None:
        """Do a job, its experts batch by batch; a failure of the kernels is in its flag.

        Raises:
            ExpertReadError: weights cannot be read.
        """
        lib, ffi = library()
        if self._stream is None:
            raise ConfigError("the experts do not arrive, they are there")
        if lib.dk_host_begin(job):
            return
        used, tokens = self._used(layer, memory.ids), len(memory.ids)
        batches = self._stream.stream(layer, used, tokens, check_stop) if used else ()
        for place, batch in enumerate(batches):
            if place == 0:  # what this layer asks for is being read by now
                self._tell_guesses(layer, memory.x)
            if not batch:
                continue
            chosen = ffi.new("uint8_t[]", self._config.num_experts)
            for expert_id, expert in batch:
                self._described.copy_to(self._passing + 3 * expert_id, expert)
                chosen[expert_id] = 1
            if lib.dk_host_part(job, self._passing, chosen):
                return
        lib.dk_host_sum(job)

    def _tell_guesses(self, layer: int, x: Tensor) -> None:
        """Guess for the layer after this one, if anybody wants that."""
        following = self._routers[layer + 1 : layer + 2]
        if self._foresight is None or not following or following[0].expert_table is not None:
            return
        most = self._foresight.guesses_wanted(layer + 1, len(x))
        if most:
            most = min(most, self._config.num_experts)
            ids = guess_by_router(x, following[0], most, backend="auto")
            self._foresight.guess(layer + 1, likeliest_first(ids))

    def _used(self, layer: int, ids: Tensor) -> list[int]:
        """Those of the chosen experts that the CPU computes, ascending."""
        places = self._places[layer]
        used = sorted(set(ids.flatten().tolist()))
        return [e for e in used if places is None or int(places[e]) < 0]

    # ---- records ----

    def _fill_layer(self, record: Any, layer: int, limit: float) -> None:
        config = self._config
        record.matrices = self._records[layer]
        record.experts = config.num_experts
        record.width = config.expert_width
        record.hidden = config.hidden_size
        record.k = config.experts_per_token
        record.limit = limit
        record.has_int8 = self._setting.has_int8
        if not self._source.is_resident:
            return
        ids = self.own(layer)
        if ids:
            self._describe(layer, ids, self._source.fetch(layer, ids))

    def _describe(self, layer: int, ids: Sequence[int], experts: Sequence[ExpertWeights]) -> None:
        records = self._records[layer]
        for expert_id, expert in zip(ids, experts, strict=True):
            for place, matrix in enumerate((expert.w1, expert.w3, expert.w2)):
                fill_matrix(records[3 * expert_id + place], matrix)
        self._kept.append(experts)

    def _fetch(self, layer: int, ids: Tensor) -> None:
        """Of a source whose experts move about, bring those that the CPU is to compute."""
        if self._source.is_resident:
            return
        used = self._used(layer, ids)
        # Also those of other layers: the next fetch may take their place.
        self._kept.clear()
        if used:
            self._describe(layer, used, self._source.fetch(layer, used))

    def _fill_job(self, job: Any, layer: int) -> None:
        job.run = self._run.cdata
        job.experts = self._layers + layer
        job.places = pointer(self._places[layer])

    def _set_step(self, job: Any) -> None:
        _, ffi = library()
        step = self.step
        job.tokens = 1
        job.x, job.ids, job.weights = pointer(step.x), pointer(step.ids), pointer(step.weights)
        job.out = pointer(self.step_out)
        job.scratch = ffi.cast("void *", self._step_scratch.data_ptr())

    @staticmethod
    def _aligned(nbytes: int) -> Tensor:
        memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
        return memory[-memory.data_ptr() % _ALIGNMENT :]


def _go_on() -> None:
    """Nobody stops."""
