"""Every byte of a network is in the sum over the kernels, once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_model import tiny_config

import edgedsv4.kernels.gpu
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.synthetic_network import (
    EXPERT_TYPES,
    RandomNetwork,
    network_outline,
    synthetic_config,
)
from edgedsv4.runtime.synthetic_traffic import (
    Traffic,
    decode_traffic,
    network_bytes,
    operations_per_token,
    prefill_traffic,
    stored_bytes,
)
from edgedsv4.runtime.token_bytes import cache_read_bytes

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.gpu_network import DeviceNetwork

SUBJECTS = [("flash", "q2"), ("flash", "mxfp4"), ("flash", "q4k"), ("pro", "q2")]


@cache
def outline(name: str, experts: str) -> tuple[ModelConfig, DeviceNetwork]:
    config = synthetic_config(name)  # type: ignore[arg-type]  # a name out of the list above
    return config, network_outline(config, EXPERT_TYPES[experts])  # type: ignore[index]  # likewise


def unused_bytes(config: ModelConfig, network: DeviceNetwork) -> int:
    """What a decoded token does not read: other rows by token id, experts that are not chosen."""
    others = config.vocab_size - 1
    unused = stored_bytes(network.embed) * others // config.vocab_size
    for layer in network.layers:
        for bank in (layer.experts.w1, layer.experts.w3, layer.experts.w2):
            size = stored_bytes(bank)
            unused += size - size * config.experts_per_token // config.num_experts
        if layer.expert_table is not None:
            unused += layer.expert_table.nbytes * others // config.vocab_size
    return unused


@pytest.mark.parametrize("subject", SUBJECTS, ids="-".join)
def test_weights_of_all_kernels_are_those_a_token_uses(subject: tuple[str, str]) -> None:
    config, network = outline(*subject)
    weights = sum(moved.weights for moved in decode_traffic(config, network, 0).values())
    assert weights == network_bytes(network) - unused_bytes(config, network)


@pytest.mark.parametrize("depth", [0, 3, 127, 4096, 65_536, 1_048_000])
def test_rows_of_all_kernels_are_those_a_token_looks_at(depth: int) -> None:
    config, network = outline("flash", "q2")
    rows = sum(moved.rows for moved in decode_traffic(config, network, depth).values())
    layout = StateLayout(config)
    expected = cache_read_bytes(layout, depth)
    visible = (depth + 1) // 4
    if visible <= config.index_topk:  # all of them are taken, so that no key is looked at
        expected -= config.compress_ratios.count(4) * visible * layout.index_key_bytes
    assert rows == expected


@pytest.mark.parametrize(("depth", "gigabytes"), [(0, 9.46), (16_384, 9.48), (65_536, 9.50)])
def test_flash_reads_what_its_specification_says(depth: int, gigabytes: float) -> None:
    config, network = outline("flash", "q2")
    found = sum(moved.from_memory for moved in decode_traffic(config, network, depth).values())
    assert found / 1e9 == pytest.approx(gigabytes, abs=0.006)
    assert network_bytes(network) / 1e9 == pytest.approx(86.6, abs=0.1)


def test_flash_computes_what_its_specification_says() -> None:
    # 26.5 with attention
    assert 25 < operations_per_token(*outline("flash", "q2")) / 1e9 < 26.5


def test_outline_has_the_bytes_of_the_network() -> None:
    config = tiny_config()
    types = EXPERT_TYPES["mxfp4"]
    made = RandomNetwork(config, types, torch.device("cpu")).make()
    assert network_bytes(network_outline(config, types)) == network_bytes(made)
    vectors = network_bytes(made) - made.nbytes()
    assert 0 < vectors < network_bytes(made) // 2


@pytest.mark.parametrize("tokens", [4, 100, 4096])
def test_prefill_reads_every_dense_matrix_once(tokens: int) -> None:
    config, network = outline("flash", "q2")
    found = prefill_traffic(config, network, tokens)
    dense = sum(stored_bytes(m) for item, m in network.matrices() if item != "routed experts")
    dense -= stored_bytes(network.embed)
    products = ("_matvec_kernel", "_fused_kernel", "_decode_kernel")
    assert sum(found[name].weights for name in products if name in found) == dense
    experts = found["_gate_up_kernel"].weights + found["_down_kernel"].weights
    whole = sum(stored_bytes(m) for item, m in network.matrices() if item == "routed experts")
    assert 0 < experts <= whole
    assert (experts > 0.99 * whole) is (tokens == 4096)


def test_every_kernel_that_is_named_exists() -> None:
    """A kernel that gets another name must get it here too, or its bytes are in no row."""
    folder = Path(edgedsv4.kernels.gpu.__path__[0])
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    kernels = set(re.findall(r"^@triton\.jit[^\n]*\n+def (\w+)\(", source, re.M))
    config, network = outline("flash", "q2")
    named = {*decode_traffic(config, network, 0)}
    named |= {*prefill_traffic(config, network, 64), *prefill_traffic(config, network, 512)}
    assert named <= kernels


def test_traffic_adds_up() -> None:
    both = Traffic(1, 2, 3) + Traffic(10, 20, 30)
    assert both == Traffic(11, 22, 33)
    assert (both.from_memory, both.total) == (33, 66)
