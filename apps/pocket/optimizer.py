"""Muon for matrices, AdamW for everything else, over one flat tensor of all trained weights.

Weights and gradients are views of two flat tensors, laid out so that matrices of one shape lie next
to each other: the norm of all gradients is one kernel, an AdamW step a dozen, a Muon step a few
batched products per shape. Nothing waits for the device: a step whose gradient is not finite
changes nothing and is counted there. Expert stacks are orthogonalised expert by expert, the grouped
output projection group by group.

Source: Muon (Keller Jordan, 2024), its scale 0.2 sqrt(max(out, in)) from Moonlight (arXiv
2502.16982); AdamW (arXiv 1711.05101).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pocket.parameters import is_trained

_ALIGNMENT = 64
"""Elements: every weight starts at a multiple of 256 bytes."""
_MATRICES = (
    *("wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b", "e_proj", "h_proj"),
    *("w1", "w2", "w3"),
)
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Constants of the optimizer."""

    clip: float = 1.0
    """Largest norm of all gradients together."""
    weight_decay: float = 0.1
    """Of the matrices that Muon trains, times the rate."""
    momentum: float = 0.95
    """Of Muon, with Nesterov's look ahead."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""


@dataclass(frozen=True)
class _MuonGroup:
    start: int
    count: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.rows * self.columns


class Optimizer:
    """Owns the flat tensors; the weights given to it become views of them."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        output_groups: int,
        device: torch.device,
        options: OptimizerOptions | None = None,
    ) -> None:
        """Lay out the weights.

        Args:
            weights: of a network, float32; tables and biases among them are left alone.
            output_groups: G, parts of `wo_a`.
            device: where training runs.
            options: constants.
        """
        self.options = options or OptimizerOptions()
        self.weights: dict[str, Tensor] = {}
        layout = _Layout(weights, output_groups)
        self._groups = layout.groups
        self._muon_stop = layout.muon_stop
        self.flat = torch.zeros(layout.size, device=device)
        self.gradient = torch.zeros_like(self.flat)
        self._momentum = torch.zeros(layout.muon_stop, device=device)
        self._first = torch.zeros(layout.size - layout.muon_stop, device=device)
        self._second = torch.zeros_like(self._first)
        self._steps = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        for name, start in layout.starts.items():
            self.weights[name] = self._adopt(weights[name], start)
        for name, weight in weights.items():
            if not is_trained(name):
                self.weights[name] = weight.to(device)

    def _adopt(self, weight: Tensor, start: int) -> Tensor:
        stop = start + weight.numel()
        self.flat[start:stop] = weight.flatten().to(self.flat)
        leaf = self.flat[start:stop].view(weight.shape).requires_grad_()
        leaf.grad = self.gradient[start:stop].view(weight.shape)
        return leaf

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        self.gradient.zero_()

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """Change the weights, unless a gradient is NaN or infinite.

        Args:
            rate: learning rate of both parts.

        Returns:
            Norm of all gradients before clipping, a scalar on the device.
        """
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        good = torch.isfinite(norm)
        flag = good.float()
        # A multiplication cannot clear a NaN, hence the fill.
        factor = (self.options.clip / norm.clamp(min=1e-12)).clamp(max=1.0)
        self.gradient.mul_(factor).masked_fill_(~good, 0.0)
        self.skipped += 1 - flag
        self._steps += flag
        self._adam(rate, flag)
        self._muon(rate, flag)
        return norm

    def _adam(self, rate: float, flag: Tensor) -> None:
        first, second = self.options.betas
        gradient = self.gradient[self._muon_stop :]
        self._first.lerp_(gradient, (1 - first) * flag)
        self._second.lerp_(gradient.square(), (1 - second) * flag)
        steps = self._steps.clamp(min=1)
        size = rate * flag / (1 - first**steps)
        scale = (self._second / (1 - second**steps)).sqrt_().add_(self.options.eps)
        self.flat[self._muon_stop :].sub_((self._first / scale).mul_(size))

    def _muon(self, rate: float, flag: Tensor) -> None:
        momentum = self.options.momentum
        gradient = self.gradient[: self._muon_stop]
        self._momentum.lerp_(gradient, (1 - momentum) * flag)
        ahead = gradient.lerp(self._momentum, momentum)
        for group in self._groups:
            part = slice(group.start, group.stop)
            shape = (group.count, group.rows, group.columns)
            weight = self.flat[part].view(shape)
            update = orthogonalised(ahead[part].view(shape))
            update = update.to(weight.dtype) * (0.2 * max(group.rows, group.columns) ** 0.5)
            weight.sub_((update + self.options.weight_decay * weight) * (rate * flag))

    def state(self) -> dict[str, Any]:
        """Weights and moments, as tensors that are not copied."""
        tables = {name: w for name, w in self.weights.items() if not is_trained(name)}
        return {
            "flat": self.flat,
            "momentum": self._momentum,
            "first": self._first,
            "second": self._second,
            "steps": self._steps,
            "skipped": self.skipped,
            "tables": tables,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        own = self.state()
        with torch.no_grad():
            for name in ("flat", "momentum", "first", "second", "steps", "skipped"):
                own[name].copy_(state[name])
            for name, table in own["tables"].items():
                table.copy_(state["tables"][name])


class _Layout:
    """Where each trained weight lies: Muon's matrices by shape, then the rest."""

    def __init__(self, weights: Mapping[str, Tensor], output_groups: int) -> None:
        trained = {name: w for name, w in weights.items() if is_trained(name)}
        slices = {
            name: _slice_shape(name, weight, output_groups)
            for name, weight in trained.items()
            if _is_matrix(name)
        }
        self.starts: dict[str, int] = {}
        self.groups: list[_MuonGroup] = []
        end = 0
        for shape in sorted(set(slices.values())):
            start = end
            for name in (name for name, own in slices.items() if own == shape):
                self.starts[name] = end
                end += trained[name].numel()
            rows, columns = shape
            self.groups.append(_MuonGroup(start, (end - start) // (rows * columns), rows, columns))
            end = _aligned(end)
        self.muon_stop = end
        for name, weight in trained.items():
            if name not in slices:
                self.starts[name] = end
                end = _aligned(end + weight.numel())
        self.size = end


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _is_matrix(name: str) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in _MATRICES


def _slice_shape(name: str, weight: Tensor, output_groups: int) -> tuple[int, int]:
    rows, columns = weight.shape[-2:]
    return (rows // output_groups if ".wo_a." in name else rows), columns


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values near 1.

    Args:
        matrices: [N, rows, columns].

    Returns:
        Same shape; bfloat16 on a GPU.
    """
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norms = torch.linalg.vector_norm(x.float(), dim=(-2, -1), keepdim=True)
    x = x / (norms + 1e-7).to(x.dtype)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


def parameters(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights that gradients change."""
    return ((name, weight) for name, weight in weights.items() if is_trained(name))
