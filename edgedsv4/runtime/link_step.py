"""What a card needs for the pieces of a step: a launch, an exchange with the host, its experts.

A token is some hundred launches that a graph replays, so each of them costs what it takes beyond
the reading of its bytes: beginning, filling the memory's pipes, ending. A chain of products of the
size of a layer's tells. Where the CPU computes for the card, a token's row goes to the host, the
stream calls C, and a row of sums comes back; a chain of such exchanges, recorded as a step is, with
experts that are all elsewhere, tells what that costs without the experts. Calls for some experts
are timed inside, in such a chain: memory and threads are then as in a step. Experts of the card are
measured as a bank of one block type, for one token and for some tokens each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from edgedsv4.errors import ConfigError
from edgedsv4.kernels._triton import IS_INTERPRETED
from edgedsv4.kernels.gpu.expert_matmul import expert_ffn_chunk, expert_scratch
from edgedsv4.kernels.gpu.expert_vec import expert_down, expert_gate_up
from edgedsv4.kernels.gpu.host_calls import host_calls
from edgedsv4.kernels.gpu.matvec import matvec
from edgedsv4.kernels.gpu.planes import SUPPORTED, DeviceMatrix, matrix_bytes, random_matrix
from edgedsv4.kernels.gpu.random_planes import UNIT_DEVIATION
from edgedsv4.model.gpu_hybrid import CallingHost, StreamHost
from edgedsv4.model.host_experts import HostExperts, HostSetting, StepMemory, step_words
from edgedsv4.runtime.link_memory import AT_ONCE, ExpertShape
from edgedsv4.runtime.synthetic_network import synthetic_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edgedsv4.model.weights import ExpertWeights
    from edgedsv4.runtime.link_memory import ExpertBench

CARD_TOKENS = (1, 4, 16, 96)
"""Tokens that each expert computes at once; the last as in a chunk of 4,096 of V4-Flash."""
_BANK = 64
_PER_TOKEN = 8
"""Experts of a token of a chunk: a divisor of any bank, so that all get as many tokens."""
_MATRICES = 16
_LAUNCHES = 64
_EXCHANGES = 16
_CHUNKS = 4
_REPLAYS = 4
_SEED = 20_260_801
_LIMIT = 10.0


def has_card_form(block_type: str) -> bool:
    """Whether random experts of a type can be made on a card."""
    return block_type in SUPPORTED and block_type in UNIT_DEVIATION


def launch_seconds(
    device: torch.device,
    family: str,
    read_rate: float,
    *,
    overlap: bool,
    shape: ExpertShape | None = None,
) -> float:
    """Seconds that a launch of a recorded step takes beyond the reading of its bytes.

    Args:
        device: the card; on the CPU the launches are not recorded.
        family: key of the tile tables.
        read_rate: bytes per second that the card reads.
        overlap: let each begin while the one before ends.
        shape: its hidden size is the size of the products, [hidden, hidden] of Q8_0.
    """
    hidden = (shape or ExpertShape()).hidden
    draw = torch.Generator(device).manual_seed(_SEED)
    matrices = [random_matrix("Q8_0", hidden, hidden, device, draw) for _ in range(_MATRICES)]
    x, y = (torch.zeros(1, hidden, device=device) for _ in range(2))
    x.normal_()

    def chain() -> None:
        y.zero_()  # something to come after, also for the first of those that overlap
        for place in range(_LAUNCHES):
            matvec(y, x, [matrices[place % _MATRICES]], family=family, overlap=overlap)

    taken = _seconds_of(chain, device) / _LAUNCHES
    return max(1e-9, taken - matrix_bytes("Q8_0", hidden, hidden) / read_rate)


def exchange_seconds(device: torch.device, threads: int, shape: ExpertShape | None = None) -> float:
    """Seconds of one exchange of a recorded step with the host.

    Args:
        device: the card; where its streams call nothing, the launching thread does.
        threads: of the CPU.
        shape: its hidden size is that of a row.
    """
    buffers = _Rows((shape or ExpertShape()).hidden, device)
    host = _idle_host(buffers.hidden, threads, is_locked=device.type == "cuda")
    partner = _partner(host, device)
    step: Any = buffers  # has what a `StepBuffers` is asked for here

    def chain() -> None:
        for _ in range(_EXCHANGES):
            partner.start(0, step)
            partner.finish()
            buffers.x.add_(buffers.host_out)

    host.begin()
    return _seconds_of(chain, device, is_recorded=partner.can_be_captured) / _EXCHANGES


def call_seconds(
    bench: ExpertBench, device: torch.device, threads: int, experts: int, calls: int
) -> tuple[float, ...]:
    """Seconds in calls of the CPU by a recorded step, each of other experts.

    Args:
        bench: whose experts are computed.
        device: the card.
        threads: of the CPU.
        experts: computed in a call, 1..`AT_ONCE`; the token's others are elsewhere.
        calls: how many at least, after some that do not count.
    """
    layers = max(1, min(_EXCHANGES, bench.count // (2 * AT_ONCE)))
    each = bench.count // layers
    is_locked = device.type == "cuda"
    host = _busy_host(
        bench,
        (layers, each),
        experts,
        HostSetting(threads=threads, has_int8=True, is_locked=is_locked),
    )
    rows, partner = _Rows(bench.shape.hidden, device), _partner(host, device)
    rows.x.normal_()
    rows.for_host.weights.fill_(1 / AT_ONCE)
    step: Any = rows
    total = torch.zeros_like(rows.host_out)

    def chain() -> None:
        for layer in range(layers):
            partner.start(layer, step)
            partner.finish()
            total.add_(rows.host_out)

    own = each - (AT_ONCE - experts)
    there = list(range(own, each))

    def choose(turn: int) -> None:
        here = sorted({(turn * experts + slot) % own for slot in range(experts)})
        rows.for_host.ids.copy_(torch.tensor([[*here, *there]], dtype=torch.int32))

    host.begin()
    choose(0)
    is_graph = partner.can_be_captured and not IS_INTERPRETED
    run = _recorded(chain).replay if is_graph else chain
    found: list[float] = []
    before = host.layer_seconds()
    for turn in range(1 + -(-calls // layers)):
        choose(turn)
        run()
        _wait(device)
        after = host.layer_seconds()
        if turn:
            found += [later - sooner for later, sooner in zip(after, before, strict=True)]
        before = after
    host.check()
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _BenchExperts:
    """The experts of a bench as those of a model of some layers."""

    bench: ExpertBench
    each: int
    is_resident: bool = True

    def check_unchanged(self) -> None:
        """There is no file."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Each in memory of its own."""
        return [self.bench.expert(layer * self.each + expert_id) for expert_id in expert_ids]


def _busy_host(
    bench: ExpertBench, shape: tuple[int, int], experts: int, setting: HostSetting
) -> HostExperts:
    """A host of a model of (layers, experts); with fewer than a token's, the last are elsewhere."""
    layers, each = shape
    config = replace(
        synthetic_config("flash", layers),
        hidden_size=bench.shape.hidden,
        expert_width=bench.shape.width,
        num_experts=each,
        experts_per_token=AT_ONCE,
    )
    places = torch.full((each,), -1, dtype=torch.int32)
    places[each - (AT_ONCE - experts) :] = 0
    source = _BenchExperts(bench, each)
    return HostExperts(config, [_LIMIT] * layers, source, [places] * layers, setting)


def _partner(host: HostExperts, device: torch.device) -> StreamHost | CallingHost:
    """Who lets a step call the host: its stream, or where that cannot, the launching thread."""
    calls = host_calls(device)
    if calls is None:
        return CallingHost(host)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return StreamHost(host, calls, stream)


class CardExpertBench:
    """Random experts of one block type on a card, and the kernels that compute them.

    Args:
        block_type: of all three matrices, one of `has_card_form`.
        device: the card.
        family: key of the tile tables.
        room: bytes for experts at most.
        shape: sizes of an expert.

    Raises:
        ConfigError: a type without a form on a card.
    """

    def __init__(
        self,
        block_type: str,
        device: torch.device,
        family: str,
        room: int,
        shape: ExpertShape | None = None,
    ) -> None:
        if not has_card_form(block_type):
            raise ConfigError(f"types: no experts of type {block_type} can be made on a card")
        self._device, self._family = device, family
        self._shape = shape or ExpertShape()
        width, hidden = self._shape.width, self._shape.hidden
        each = 2 * matrix_bytes(block_type, width, hidden) + matrix_bytes(block_type, hidden, width)
        self.bytes_per_weight = each / self._shape.weights
        """Bytes of storage per element."""
        self._count = max(1, min(_BANK, room // each) // _PER_TOKEN) * _PER_TOKEN
        draw = torch.Generator(device).manual_seed(_SEED)
        sizes = ((width, hidden), (width, hidden), (hidden, width))
        self._banks: tuple[DeviceMatrix, ...] = tuple(
            random_matrix(block_type, self._count * rows, columns, device, draw)
            for rows, columns in sizes
        )

    def rate(self, tokens: int) -> float:
        """Stored weights that are computed per second, each counted once whatever the tokens.

        Args:
            tokens: that every expert computes; 1 runs the kernels of a single token.
        """
        if tokens == 1:
            return AT_ONCE * self._shape.weights / self._token_seconds()
        return self._count * self._shape.weights / self._chunk_seconds(tokens)

    def _token_seconds(self) -> float:
        w1, w3, w2 = self._banks
        hidden, width = self._shape.hidden, self._shape.width
        x = torch.randn(1, hidden, device=self._device)
        h = torch.empty(AT_ONCE * width, device=self._device)
        out = torch.empty(1, hidden, device=self._device)
        weights = torch.full((AT_ONCE,), 1 / AT_ONCE, device=self._device)
        turns = [
            torch.tensor(
                [(first + slot) % self._count for slot in range(AT_ONCE)],
                dtype=torch.int32,
                device=self._device,
            )
            for first in range(0, self._count, AT_ONCE)
        ]

        def chain() -> None:
            for slots in turns:
                limits = (_LIMIT, _LIMIT)
                expert_gate_up(h, x, slots, (w1, w3), None, limits, family=self._family)
                expert_down(out, h, slots, weights, w2, None, family=self._family)

        return _seconds_of(chain, self._device) / len(turns)

    def _chunk_seconds(self, tokens: int) -> float:
        rows = tokens * self._count // _PER_TOKEN
        hidden, width = self._shape.hidden, self._shape.width
        device = self._device
        x, out = torch.randn(rows, hidden, device=device), torch.empty(rows, hidden, device=device)
        places = torch.arange(rows * _PER_TOKEN, dtype=torch.int32, device=device)
        ids = (places % self._count).view(rows, _PER_TOKEN)
        weights = torch.full((rows, _PER_TOKEN), 1 / _PER_TOKEN, device=device)
        scratch = expert_scratch(
            rows, _PER_TOKEN, self._count, hidden, width, device=device, precise=False
        )
        w1, w3, w2 = self._banks

        def work() -> None:
            expert_ffn_chunk(out, x, ids, weights, (w1, w3, w2), _LIMIT, scratch=scratch)

        def often() -> None:
            for _ in range(_CHUNKS):
                work()

        # Not recorded: a chunk is launched as this is, and takes far longer than its launches.
        return _seconds_of(often, device, is_recorded=False) / _CHUNKS


class _Rows:
    """What a step hands to the CPU and takes back, of one token."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        self.hidden = hidden
        words = step_words(hidden, AT_ONCE)[2]
        self.for_host = StepMemory(hidden, AT_ONCE, torch.zeros(words, device=device))
        self.x = self.for_host.x
        self.host_out = torch.zeros(1, hidden, device=device)


@dataclass(frozen=True, slots=True)
class _NoExperts:
    """The source of a model whose experts all are elsewhere."""

    is_resident: bool = True

    def check_unchanged(self) -> None:
        """There is no file."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Nobody asks."""
        raise NotImplementedError(f"experts {expert_ids} of layer {layer} are elsewhere")


def _idle_host(hidden: int, threads: int, *, is_locked: bool) -> HostExperts:
    """A host that is called and finds all experts of the token elsewhere."""
    config = replace(synthetic_config("flash", 1), hidden_size=hidden, experts_per_token=AT_ONCE)
    places = torch.zeros(config.num_experts, dtype=torch.int32)
    setting = HostSetting(threads=threads, has_int8=True, is_locked=is_locked)
    return HostExperts(config, [_LIMIT], _NoExperts(), [places], setting)


def _seconds_of(
    work: Callable[[], None], device: torch.device, *, is_recorded: bool = True
) -> float:
    """Seconds of some launches, recorded as a graph where the card has graphs; the best of some."""
    if is_recorded and device.type == "cuda" and not IS_INTERPRETED:
        run = _recorded(work).replay
    else:
        run = work
    run()
    _wait(device)
    found = []
    for _ in range(_REPLAYS):
        began = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - began)
    return min(found)


def _recorded(work: Callable[[], None]) -> Any:
    """The launches as a graph, compiled before they are recorded, as a step is."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
