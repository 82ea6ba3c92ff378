"""The whole network by Triton kernels against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from gpu_models import SMALL_SHAPE, both
from memory_model import evaluate, ids_tensor
from tiny_model import random_tensors, random_tokens, tiny_config
from triton_device import DEVICE

from edgedsv4.model.hooks import ForwardHooks

pytestmark = pytest.mark.usefixtures("few_programs")
SEED = 5
IS_SMALL = DEVICE == "cpu"
"""The interpreter takes a second for what a GPU does in microseconds."""
COUNT = 11 if IS_SMALL else 300
RATIOS = (0, 4) if IS_SMALL else (0, 4, 128, 4, 0)
SHAPE = {"index_topk": 2, **SMALL_SHAPE} if IS_SMALL else {}
EXACT_LIMIT = 2e-4
DEFAULT_LIMIT = 0.08
"""Root mean square of the error, of that of the logits: a product of bfloat16 operands is good to
0.2 %, and a random model carries what five layers of them add up to; stored rows round either way,
so single logits are off by several times as much. A wrong kernel gives errors of order 1."""


@dataclass
class Selections:
    """What one forward selected, to be forced on another."""

    topk: dict[int, torch.Tensor] = field(default_factory=dict)
    experts: dict[int, torch.Tensor] = field(default_factory=dict)

    def recording(self) -> ForwardHooks:
        """Hooks that remember."""
        return ForwardHooks(
            on_topk=lambda layer, _, ids: self.topk.setdefault(layer, ids),
            on_experts=lambda layer, _, ids: self.experts.setdefault(layer, ids),
        )

    def forcing(self) -> ForwardHooks:
        """Hooks that replace."""
        return ForwardHooks(
            on_topk=lambda layer, _, ids: self.topk.get(layer, ids),
            on_experts=lambda layer, _, ids: self.experts.get(layer, ids),
        )


def test_chunks_and_tokens_give_the_logits_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that the last tokens are decoded by the step for few rows, and then by that for all.
    monkeypatch.setattr("edgedsv4.model.gpu_decode.NEAR_ROWS", COUNT // 4 - 1)
    config = tiny_config(compress_ratios=RATIOS, **SHAPE)
    reference, model = both(config, random_tensors(config, SEED), "exact")
    ids = random_tokens(config, COUNT, SEED)
    sizes = [COUNT - 3, 1, 2] if IS_SMALL else [COUNT - 5, 2, 1, 1, 1]
    expected = evaluate(reference, ids, sizes=sizes)
    found = evaluate(model, ids, cache=model.new_cache(COUNT + 8), sizes=sizes).cpu()
    assert float((found - expected).abs().max()) < EXACT_LIMIT


def test_default_profile_with_the_same_selections() -> None:
    config = tiny_config(compress_ratios=RATIOS, **SHAPE)
    reference, model = both(config, random_tensors(config, SEED), "default")
    ids = random_tokens(config, COUNT, SEED)
    chosen = Selections()
    expected = evaluate(reference, ids, hooks=chosen.recording())
    found = evaluate(model, ids, cache=model.new_cache(COUNT), hooks=chosen.forcing()).cpu()
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < DEFAULT_LIMIT


@pytest.mark.skipif(IS_SMALL, reason="takes minutes in the interpreter")
def test_failed_forward_leaves_the_timeline() -> None:
    config = tiny_config(compress_ratios=RATIOS)
    _, model = both(config, random_tensors(config, SEED), "default")
    ids = ids_tensor(random_tokens(config, 40, SEED))
    cache = model.new_cache(64)
    model.forward(ids[:30], cache)
    before = model.forward(ids[30:31], cache).logits
    cache.rewind(30)

    def stop() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.forward(ids[30:40], cache, hooks=ForwardHooks(should_stop=stop))
    assert cache.length == 30
    after = model.forward(ids[30:31], cache).logits
    assert before is not None
    assert after is not None
    torch.testing.assert_close(after, before, rtol=0, atol=0)
