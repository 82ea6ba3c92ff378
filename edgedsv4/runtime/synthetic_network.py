"""Networks of the released shapes with random weights, made on the device: speed without a file.

Every layer has weights of its own, so that a decoded token reads as many bytes as from a file of
the same block types. Shapes: config.json of DeepSeek-V4-Flash and DeepSeek-V4-Pro.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from edgedsv4.config import ModelConfig, RopeScaling
from edgedsv4.errors import ConfigError
from edgedsv4.kernels.gpu.planes import DeviceMatrix, empty_matrix, random_matrix
from edgedsv4.model.gpu_banks import ExpertBank
from edgedsv4.model.gpu_network import (
    DeviceCompressor,
    DeviceHyper,
    DeviceLayer,
    DeviceNetwork,
    side_by_side,
    stacked,
)
from edgedsv4.model.layer_plan import layer_plans

if TYPE_CHECKING:
    from edgedsv4.model.gpu_banks import PlacedLayer
    from edgedsv4.model.layer_plan import LayerPlan

SyntheticName = Literal["flash", "pro"]
ExpertRecipe = Literal["q2", "mxfp4", "q4k"]


@dataclass(frozen=True, slots=True)
class ExpertTypes:
    """Block types of routed experts."""

    gate_up: str
    down: str


EXPERT_TYPES: Mapping[str, ExpertTypes] = MappingProxyType(
    {
        "q2": ExpertTypes("IQ2_XXS", "Q2_K"),
        "mxfp4": ExpertTypes("MXFP4", "MXFP4"),
        "q4k": ExpertTypes("Q4_K", "Q4_K"),
    }
)
DENSE_TYPE = "Q8_0"
SMALL_TYPE = "BF16"
"""Of the embedding, the router, the compressors and the indexer's head weights."""

_FLASH = ModelConfig(
    architecture="deepseek4",
    vocab_size=129_280,
    hidden_size=4096,
    num_layers=43,
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1024,
    output_groups=8,
    output_lora_rank=1024,
    window=128,
    index_heads=64,
    index_dim=128,
    index_topk=512,
    num_experts=256,
    experts_per_token=6,
    num_shared_experts=1,
    expert_width=2048,
    routed_scale=1.5,
    num_hash_layers=3,
    swiglu_limits=(10.0,) * 43,
    shared_swiglu_limits=(10.0,) * 43,
    hc_streams=4,
    hc_sinkhorn_iterations=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    compress_rope_theta=160_000.0,
    rope_scaling=RopeScaling(factor=16.0, original_context=65_536),
    max_context=1_048_576,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    bos_id=0,
    eos_id=1,
    pad_id=2,
)
_PRO = replace(
    _FLASH,
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    q_lora_rank=1536,
    output_groups=16,
    index_topk=1024,
    num_experts=384,
    expert_width=3072,
    routed_scale=2.5,
    swiglu_limits=(10.0,) * 61,
    shared_swiglu_limits=(10.0,) * 61,
    compress_ratios=(128, 128, *(4, 128) * 29, 4),
)
_CONFIGS: Mapping[str, ModelConfig] = MappingProxyType({"flash": _FLASH, "pro": _PRO})


def synthetic_config(name: SyntheticName, layers: int | None = None) -> ModelConfig:
    """Shape of a released model, or of its first layers.

    Raises:
        ConfigError: an unknown name, or more layers than the model has.
    """
    if name not in _CONFIGS:
        raise ConfigError(f"synthetic models are {', '.join(_CONFIGS)}; found {name!r}")
    config = _CONFIGS[name]
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise ConfigError(f"layers must be 1..{config.num_layers} for {name}, found {layers}")
    return first_layers(config, layers)


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """Shape of the first layers of a model."""
    return replace(
        config,
        num_layers=layers,
        num_hash_layers=min(layers, config.num_hash_layers),
        swiglu_limits=config.swiglu_limits[:layers],
        shared_swiglu_limits=config.shared_swiglu_limits[:layers],
        compress_ratios=config.compress_ratios[:layers],
    )


def network_outline(config: ModelConfig, experts: ExpertTypes) -> DeviceNetwork:
    """The network that `RandomNetwork` makes, without memory: for counting bytes."""
    return RandomNetwork(config, experts, torch.device("meta")).make()


class RandomNetwork:
    """Draws the weights of a network on a device.

    Args:
        config: shape.
        experts: block types of the routed experts.
        device: where they are made; on `meta` nothing is drawn, and nothing takes memory.
        seed: the same one gives the same weights on the same kind of device.
        placed: the routed experts of a layer, made elsewhere; None draws them.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertTypes,
        device: torch.device,
        seed: int = 0,
        placed: Callable[[int], PlacedLayer] | None = None,
    ) -> None:
        self._config = config
        self._placed = placed
        self._experts = experts
        self._device = device
        self._generator: torch.Generator | None = None
        if device.type != "meta":
            self._generator = torch.Generator(device).manual_seed(seed)

    def make(self) -> DeviceNetwork:
        """Draw everything."""
        config = self._config
        return DeviceNetwork(
            embed=self._matrix(SMALL_TYPE, config.vocab_size, config.hidden_size),
            norm=self._norm(config.hidden_size),
            head=self._matrix(DENSE_TYPE, config.vocab_size, config.hidden_size),
            hc_head=self._hyper(config.hc_streams, 1),
            layers=tuple(self._layer(plan) for plan in layer_plans(config)),
            draft=None,
        )

    def _layer(self, plan: LayerPlan) -> DeviceLayer:
        config = self._config
        hidden, rank, dim = config.hidden_size, config.q_lora_rank, config.head_dim
        heads, low = config.num_heads * dim, config.output_groups * config.output_lora_rank
        entrance = [
            ("qr", self._matrix(DENSE_TYPE, rank, hidden)),
            ("kv", self._matrix(DENSE_TYPE, dim, hidden)),
        ]
        queries = [("q", self._matrix(DENSE_TYPE, heads, rank))]
        series = 2 if plan.has_overlap else 1
        compressor = indexer = None
        if plan.ratio:
            compressor = self._compressor(plan.ratio, series * dim, dim)
            entrance += self._pair("values", "gates", series * dim)
        if plan.index_source is not None:
            width = series * config.index_dim
            indexer = self._compressor(plan.ratio, width, config.index_dim)
            entrance += self._pair("index_values", "index_gates", width)
            entrance.append(("index_weights", self._matrix(SMALL_TYPE, config.index_heads, hidden)))
            rows = config.index_heads * config.index_dim
            queries.append(("iq", self._matrix(DENSE_TYPE, rows, rank)))
        placed = None if self._placed is None else self._placed(plan.layer)
        inner = config.num_shared_experts * config.expert_width
        rows = (2 + config.hc_streams) * config.hc_streams
        return DeviceLayer(
            plan=plan,
            attn_norm=self._norm(hidden),
            ffn_norm=self._norm(hidden),
            hc_attn=self._hyper(rows, 3),
            hc_ffn=self._hyper(rows, 3),
            entrance=stacked(entrance),
            q_norm=self._norm(rank),
            kv_norm=self._norm(dim),
            queries=side_by_side(queries),
            compressor=compressor,
            indexer=indexer,
            sink=self._normal(config.num_heads),
            wo_a=self._matrix(DENSE_TYPE, low, heads // config.output_groups),
            wo_b=self._matrix(DENSE_TYPE, hidden, low),
            router=self._matrix(SMALL_TYPE, config.num_experts, hidden),
            bias=None if plan.is_hash_routed else self._normal(config.num_experts) * 0.1,
            expert_table=self._table() if plan.is_hash_routed else None,
            shared_w1=self._matrix(DENSE_TYPE, inner, hidden),
            shared_w3=self._matrix(DENSE_TYPE, inner, hidden),
            shared_w2=self._matrix(DENSE_TYPE, hidden, inner),
            experts=self._bank() if placed is None else placed.bank.experts,
            placed=placed,
        )

    def _bank(self) -> ExpertBank:
        config, types = self._config, self._experts
        count, width, hidden = config.num_experts, config.expert_width, config.hidden_size
        return ExpertBank(
            w1=self._matrix(types.gate_up, count * width, hidden),
            w3=self._matrix(types.gate_up, count * width, hidden),
            w2=self._matrix(types.down, count * hidden, width),
        )

    def _pair(self, first: str, second: str, rows: int) -> list[tuple[str, DeviceMatrix]]:
        hidden = self._config.hidden_size
        return [(name, self._matrix(SMALL_TYPE, rows, hidden)) for name in (first, second)]

    def _compressor(self, ratio: int, width: int, dim: int) -> DeviceCompressor:
        return DeviceCompressor(self._normal(ratio, width), self._norm(dim))

    def _hyper(self, rows: int, scales: int) -> DeviceHyper:
        width = self._config.hc_streams * self._config.hidden_size
        fn = self._normal(rows, width) * width**-0.5
        return DeviceHyper(fn, self._normal(rows) * 0.5, torch.ones(scales, device=self._device))

    def _table(self) -> Tensor:
        config = self._config
        scores = torch.rand(
            (config.vocab_size, config.num_experts),
            generator=self._generator,
            device=self._device,
        )
        return scores.topk(config.experts_per_token).indices.to(torch.int32).contiguous()

    def _matrix(self, name: str, rows: int, cols: int) -> DeviceMatrix:
        if self._generator is None:
            return empty_matrix(name, rows, cols, self._device)
        return random_matrix(name, rows, cols, self._device, self._generator)

    def _norm(self, width: int) -> Tensor:
        return 1.0 + 0.1 * self._normal(width)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)
