"""Expert stores over tiny models, and what tests do with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from memory_model import computed_by

from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.quant_matmul import dequantize
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.model.weights import ExpertWeights, RoutedExperts, load_weights
from edgedsv4.runtime.cache_policies import LeastRecentlyUsed
from edgedsv4.runtime.expert_files import ExpertFiles
from edgedsv4.runtime.ram_store import ExpertStore, StoreOptions

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.model import Model


def options(slots: int, **changes: Any) -> StoreOptions:
    """Options of a small store."""
    chosen = {"staging": 2, "policy": LeastRecentlyUsed, "layers": 2, "depth": 4, **changes}
    return StoreOptions(slots=slots, **chosen)


@contextmanager
def opened_store(
    path: Path,
    slots: int,
    *,
    io: str = "auto",
    kind: type[ExpertStore] = ExpertStore,
    **changes: Any,
) -> Iterator[tuple[ExpertStore, RoutedExperts]]:
    """A store over a model file, and the same experts in the mapping."""
    with open_checkpoint(path) as checkpoint:
        _, experts = load_weights(checkpoint)
        files = ExpertFiles(experts, io)  # type: ignore[arg-type]  # one of three modes
        store = kind(experts, files, options(slots, **changes))
        try:
            yield store, experts
        finally:
            store.close()


@contextmanager
def stored_model(
    path: Path, slots: int, *, backend: str = "native", profile: str = "default", **changes: Any
) -> Iterator[tuple[Model, ExpertStore, ModelConfig]]:
    """A model whose experts come out of a store; `slots` 0 takes the mapping."""
    numerics = Numerics(profile=profile, dtype=torch.float32, device=torch.device("cpu"))  # type: ignore[arg-type]
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        weights, experts = load_weights(checkpoint)
        if not slots:
            yield computed_by(backend, config, weights, experts, numerics), None, config  # type: ignore[misc]
            return
        tables = {
            layer: part.moe.expert_table
            for layer, part in enumerate(weights.layers)
            if part.moe.expert_table is not None
        }
        chosen = options(slots, **{"layers": config.num_layers, "tables": tables, **changes})
        store = ExpertStore(experts, ExpertFiles(experts, "auto"), chosen)
        try:
            yield computed_by(backend, config, weights, store, numerics), store, config
        finally:
            store.close()


def same_expert(ours: ExpertWeights, theirs: ExpertWeights) -> bool:
    """Whether two experts hold the same numbers."""
    pairs = ((getattr(ours, n), getattr(theirs, n)) for n in ("w1", "w3", "w2"))
    return all(torch.equal(dequantize(a), dequantize(b)) for a, b in pairs)


def greedy(model: Model, prompt: list[int], count: int, chunk: int = 1000) -> list[int]:
    """Ids of a prompt's greedy continuation."""
    cache = model.new_cache(len(prompt) + count)
    logits = None
    for first in range(0, len(prompt), chunk):
        logits = model.forward(torch.tensor(prompt[first : first + chunk]), cache).logits
    found = []
    for _ in range(count):
        assert logits is not None
        found.append(int(logits[-1].argmax()))
        logits = model.forward(torch.tensor(found[-1:]), cache).logits
    return found
