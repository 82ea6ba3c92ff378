"""Tiny models on the GPU backend, and the reference beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from memory_model import model_of
from triton_device import DEVICE

from edgedsv4.model.gpu_model import GpuModel
from edgedsv4.model.gpu_network import NetworkLoader
from edgedsv4.model.kv_cache import Numerics

if TYPE_CHECKING:
    from memory_model import Tensors

    from edgedsv4.config import ModelConfig, Profile
    from edgedsv4.model.model import Model

SMALL_SHAPE = {
    "vocab_size": 64,
    "num_heads": 2,
    "q_lora_rank": 32,
    "output_lora_rank": 16,
    "index_heads": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "hc_sinkhorn_iterations": 3,
}
"""Changes of `tiny_config` for the interpreter, whose time goes with the number of programs and of
their loops' rounds: sizes of single kernels are the matter of their own tests."""


def gpu_model_of(model: Model, family: str = "") -> GpuModel:
    """The weights of a CPU model on the device under test, as if it were of a family."""
    device = torch.device(DEVICE)
    numerics = Numerics(profile=model.numerics.profile, dtype=torch.float32, device=device)
    loader = NetworkLoader(model.config, device, "F32")
    network = loader.load(model.weights, model.experts)
    return GpuModel(
        model.config, model.weights, model.experts, numerics, network=network, family=family
    )


def both(config: ModelConfig, tensors: Tensors, profile: Profile) -> tuple[Model, GpuModel]:
    """The reference and the GPU backend with the same weights."""
    reference = model_of(config, tensors, profile=profile)
    return reference, gpu_model_of(reference)
