"""Random networks whose routed experts are in main memory, and of which a card holds a part.

Every expert has memory of its own, so that a token's experts are read from where those of a real
model would be; their contents repeat a random piece, which no kernel can tell. Blocks are as in a
file: the CPU multiplies with them, and the card takes them apart as it would a file's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import CapacityError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.gpu.planes import matrix_bytes
from edgedsv4.kernels.gpu.random_planes import UNIT_DEVIATION
from edgedsv4.kernels.native.library import library, new_run
from edgedsv4.kernels.quant_matmul import QuantMatrix
from edgedsv4.model.gpu_banks import PlacedExperts
from edgedsv4.model.host_experts import HostSetting
from edgedsv4.model.weights import ExpertWeights
from edgedsv4.runtime.expert_placement import CardExperts, LayerExperts, place_experts
from edgedsv4.runtime.expert_rates import READ_BYTES, read_rate
from edgedsv4.runtime.host_memory import HostMemory
from edgedsv4.runtime.hybrid import HybridWork, with_hybrid
from edgedsv4.runtime.synthetic_network import RandomNetwork
from edgedsv4.runtime.synthetic_report import HostShare

if TYPE_CHECKING:
    from edgedsv4.config import CpuExperts, ModelConfig
    from edgedsv4.kernels.native.library import NativeRun
    from edgedsv4.model.gpu_hybrid import HybridExperts
    from edgedsv4.model.gpu_network import DeviceNetwork
    from edgedsv4.runtime.synthetic_network import ExpertTypes

_TEMPLATE_BYTES = 64 << 20
"""Random bytes of a type at most; what is longer repeats them, from another block on."""
_HALF_SCALES = {
    "IQ2_XXS": ((0, 1.0),),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q4_K": ((0, 1.0), (2, 7.5)),
}
"""Half floats in a block: byte, and times the scale."""


@dataclass(frozen=True, slots=True)
class HybridRecipe:
    """What `hybrid_network` makes."""

    types: ExpertTypes
    mode: CpuExperts
    threads: int
    room: int
    """Bytes of the card for experts."""


class RandomExperts:
    """An `ExpertSource` of random blocks in main memory.

    Args:
        config: shape of the model.
        types: of the blocks.
        threads: that fill the memory.
        is_locked: page-lock it, for copies to a GPU.
        seed: of the random pieces.

    Raises:
        CapacityError: the machine has not as much memory.
    """

    is_resident = True

    def __init__(
        self,
        config: ModelConfig,
        types: ExpertTypes,
        threads: int,
        *,
        is_locked: bool,
        seed: int = 0,
    ) -> None:
        self._memory: list[HostMemory] = []
        self._stacks: list[ExpertWeights] = []
        self._count = config.num_experts
        self.is_locked = is_locked
        try:
            self._make(config, types, threads, is_locked=is_locked, seed=seed)
        except BaseException:
            self.close()  # or page-locked memory would be unmapped as it is
            raise

    def _make(
        self, config: ModelConfig, types: ExpertTypes, threads: int, *, is_locked: bool, seed: int
    ) -> None:
        count, width, hidden = config.num_experts, config.expert_width, config.hidden_size
        shapes = ((types.gate_up, width, hidden),) * 2 + ((types.down, hidden, width),)
        draw = torch.Generator().manual_seed(seed)
        templates = {shape: _template(shape[0], shape[2], draw) for shape in shapes}
        run = new_run(threads)
        for layer in range(config.num_layers):
            matrices = []
            for role, shape in enumerate(shapes):
                name, rows, columns = shape
                row_bytes = BLOCK_TYPES[name].row_bytes(columns)
                memory = HostMemory(count * rows * row_bytes)
                self._memory.append(memory)
                block = BLOCK_TYPES[name].block_bytes
                _fill(run, memory.bytes, templates[shape], (7 * layer + role) * 1009 * block)
                if is_locked:
                    memory.lock_for_gpu()
                data = memory.bytes.view(count * rows, row_bytes)
                matrices.append(QuantMatrix(BLOCK_TYPES[name], count * rows, columns, data))
            w1, w3, w2 = matrices
            self._stacks.append(ExpertWeights(w1=w1, w3=w3, w2=w2))

    def check_unchanged(self) -> None:
        """There is no file."""

    def stacks(self, layer: int) -> ExpertWeights:
        """All experts of a layer below one another."""
        return self._stacks[layer]

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Views of some experts."""
        stack = self._stacks[layer]
        return [
            ExpertWeights(
                w1=_part(stack.w1, expert, self._count),
                w3=_part(stack.w3, expert, self._count),
                w2=_part(stack.w2, expert, self._count),
            )
            for expert in expert_ids
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._stacks.clear()
        for memory in self._memory:
            memory.close()
        self._memory.clear()


def expert_sizes(config: ModelConfig, types: ExpertTypes) -> tuple[LayerExperts, ...]:
    """Bytes of an expert of each layer."""
    width, hidden = config.expert_width, config.hidden_size
    shapes = ((types.gate_up, width, hidden),) * 2 + ((types.down, hidden, width),)
    card = sum(matrix_bytes(*shape) for shape in shapes)
    stored = sum(BLOCK_TYPES[name].row_bytes(cols) * rows for name, rows, cols in shapes)
    return (LayerExperts(shapes, card, stored),) * config.num_layers


def chosen_experts(config: ModelConfig, recipe: HybridRecipe) -> CardExperts:
    """Which experts live on the card.

    Raises:
        CapacityError: it has no room for the experts of a token.
    """
    sizes = expert_sizes(config, recipe.types)
    chosen = place_experts(
        sizes, config.num_experts, recipe.room, least_staged=config.experts_per_token
    )
    if chosen.staging_bytes > recipe.room:
        raise CapacityError(
            "the card has no room for experts that pass through it",
            needed_bytes=chosen.staging_bytes,
            available_bytes=max(0, recipe.room),
            is_on_device=True,
        )
    return chosen


def hybrid_network(
    config: ModelConfig,
    recipe: HybridRecipe,
    device: torch.device,
    source: RandomExperts | None = None,
) -> tuple[DeviceNetwork, RandomExperts, CardExperts]:
    """A random network, its experts, and which of them live on the card.

    Args:
        config: shape of the model.
        recipe: what is made.
        device: the card.
        source: experts that were made before; None makes them. Given ones stay open on an error.

    Raises:
        CapacityError: the card has no room for the experts of a token, or main memory for all.
    """
    chosen = chosen_experts(config, recipe)
    given = source
    source = source or random_experts(config, recipe, device)
    try:
        placed = PlacedExperts(config, source, chosen.placement, device, "BF16", source.stacks)
        network = RandomNetwork(config, recipe.types, device, placed=placed.fill).make()
        setting = HostSetting(threads=recipe.threads, has_int8=True, is_locked=source.is_locked)
        work = HybridWork(mode=recipe.mode, setting=setting, device=device)
        network = with_hybrid(network, config, source, work)
    except BaseException:
        if given is None:
            source.close()
        raise
    return network, source, chosen


def random_experts(
    config: ModelConfig, recipe: HybridRecipe, device: torch.device
) -> RandomExperts:
    """All routed experts, in main memory from which the card copies.

    Raises:
        CapacityError: the machine has not as much memory.
    """
    return RandomExperts(config, recipe.types, recipe.threads, is_locked=device.type == "cuda")


def host_facts(recipe: HybridRecipe, chosen: CardExperts) -> dict[str, object]:
    """What a report says of the CPU's part, its memory's rate included."""
    return {
        "cpu_experts": recipe.mode,
        "threads": recipe.threads,
        "read_rate": read_rate(recipe.threads, READ_BYTES),
        "experts_on_card": chosen.resident,
        "experts": chosen.total,
        "resident_bytes": chosen.resident_bytes,
        "staging_bytes": chosen.staging_bytes,
    }


@dataclass(frozen=True, slots=True)
class HostWork:
    """What the CPU computed in some tokens."""

    experts: int
    seconds: float

    def per_token(self, tokens: int, size: LayerExperts) -> HostShare:
        """The share of one token of so many."""
        experts = self.experts / tokens
        return HostShare(experts, self.seconds / tokens, experts * size.stored_bytes)


def with_host_share(
    hybrid: HybridExperts, work: Callable[[], list[float]]
) -> tuple[list[float], HostWork]:
    """What some work gives, and what the CPU computed meanwhile."""
    host = hybrid.host
    if host is None:
        return work(), HostWork(0, 0.0)
    before = host.counts()
    found = work()
    after = host.counts()
    return found, HostWork(after.experts - before.experts, after.seconds - before.seconds)


def _template(name: str, columns: int, draw: torch.Generator) -> Tensor:
    """Random blocks, elements of a standard deviation of about 1 / sqrt(columns)."""
    block = BLOCK_TYPES[name].block_bytes
    count = _TEMPLATE_BYTES // block
    blocks = torch.randint(0, 256, (count, block), dtype=torch.uint8, generator=draw)
    scale = float(columns) ** -0.5 / UNIT_DEVIATION[name]
    if name == "MXFP4":
        blocks[:, 0] = 127 + round(float(torch.tensor(scale).log2()))
        return blocks.view(-1)
    for at, factor in _HALF_SCALES[name]:
        half = torch.tensor([scale * factor], dtype=torch.float16).view(torch.uint8)
        blocks[:, at : at + 2] = half
    return blocks.view(-1)


def _fill(run: NativeRun, target: Tensor, template: Tensor, start: int) -> None:
    """Repeat a piece, from byte `start` of it on."""
    lib, ffi = library()
    pairs: list[tuple[int, int, int]] = []
    at, position = 0, start % template.numel()
    while at < target.numel():
        size = min(template.numel() - position, target.numel() - at)
        pairs.append((target.data_ptr() + at, template.data_ptr() + position, size))
        at, position = at + size, 0
    targets = ffi.new("void *[]", [ffi.cast("void *", pair[0]) for pair in pairs])
    sources = ffi.new("void *[]", [ffi.cast("void *", pair[1]) for pair in pairs])
    lengths = ffi.new("int64_t[]", [pair[2] for pair in pairs])
    run.check(lib.dk_copy_many(run.cdata, targets, sources, lengths, len(pairs)))


def _part(stack: QuantMatrix, expert: int, count: int) -> QuantMatrix:
    rows = stack.rows // count
    data = stack.data[expert * rows : (expert + 1) * rows]
    return QuantMatrix(stack.block_type, rows, stack.columns, data)
