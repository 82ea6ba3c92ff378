"""Checks of the kernels between products on a GPU: streams, routing, the choice of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgedsv4.config import SamplingOptions
from edgedsv4.kernels.gpu.hyper import head_step, hyper_step, hyper_work_floats
from edgedsv4.kernels.gpu.route import route
from edgedsv4.kernels.gpu.sample import (
    SamplingWork,
    TokenCounts,
    argmax,
    argmax_work_ints,
    options_of,
    sample,
)
from edgedsv4.kernels.mhc import (
    HyperConstants,
    HyperMix,
    head_mix,
    hyper_read_reference,
    read_streams,
    write_streams,
)
from edgedsv4.kernels.rms_norm import rms_norm_reference
from edgedsv4.kernels.router import route_reference, router_scores, routing_weights
from edgedsv4.kernels.sample import SamplingRules, SeenTokens, sample_reference
from edgedsv4.runtime.selftest.check import LIMIT, Check, Outputs, draw
from edgedsv4.runtime.selftest.gpu_products import unset

_CONSTANTS = HyperConstants(iterations=4, hc_eps=1e-6, norm_eps=1e-6)
_HC, _HIDDEN = 4, 200
_SCALE, _CHOSEN, _EXPERTS = 1.5, 5, 37
_VOCAB = 1100
_UNIFORM = (0.03, 0.98)
_RULES = (
    SamplingOptions(temperature=0.7),
    SamplingOptions(temperature=0.6, top_k=40, top_p=0.9, repetition_penalty=1.3),
)


def step_checks(device: torch.device) -> Iterator[Check]:
    """Hyper-connections of one token and of several, routing, greedy and drawn tokens."""
    for tokens in (1, 12):
        label = "a token" if tokens == 1 else "a chunk"
        hyper, right = partial(_hyper, device, tokens), partial(_hyper_right, tokens)
        yield _check(f"hyper-connections of {label}", hyper, right)
    yield _check("routing", partial(_route, device), _routed)
    yield _check("likeliest token", partial(_argmax, device), _likeliest, limit=0)
    yield _check("sample", partial(_sample, device), _sampled, limit=0)


def _check(
    name: str, compute: Callable[[], Outputs], expected: Callable[[], Outputs], limit: float = LIMIT
) -> Check:
    return Check(name, lambda _backend: compute(), expected, limit, ("triton",))


# ---- hyper-connections: a step that writes and reads, then the head ----


def _parameters(rows: int) -> dict[str, Tensor]:
    return {
        "fn": draw(300 + rows, rows, _HC * _HIDDEN) / _HIDDEN**0.5,
        "base": draw(301 + rows, rows),
        "scale": 0.8 + 0.2 * draw(302 + rows, 3 if rows > _HC else 1),
        "norm": 1 + 0.1 * draw(303, _HIDDEN),
    }


def _hyper_inputs(tokens: int) -> dict[str, Tensor]:
    return {
        "post": 1 + 0.5 * draw(311, tokens, _HC),
        "comb": 0.5 * torch.eye(_HC) + 0.2 * draw(312, tokens, _HC, _HC),
        "streams": draw(313, tokens, _HC, _HIDDEN),
        "o": draw(314, tokens, _HIDDEN),
    }


def _hyper(device: torch.device, tokens: int) -> list[Tensor]:
    work = unset(device, hyper_work_floats(tokens, _HIDDEN))
    given = {name: value.to(device) for name, value in _hyper_inputs(tokens).items()}
    fixed = {"constants": _CONSTANTS, "work": work, "precise": True}
    step, head = (_options(rows, device) | fixed for rows in (24, _HC))
    x, y = unset(device, tokens, _HIDDEN), unset(device, 1, _HIDDEN)
    post, comb, streams, o = (given[name] for name in ("post", "comb", "streams", "o"))
    hyper_step(x, post, comb, streams, o, **step)
    results = [x, *(part.clone() for part in (post, comb, streams))]
    head_step(y, streams, o, post, comb, **head)
    return [*results, y, streams]


def _options(rows: int, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in _parameters(rows).items()}


def _hyper_right(tokens: int) -> list[Tensor]:
    given = {name: value.double() for name, value in _hyper_inputs(tokens).items()}
    step, head = (
        {name: value.double() for name, value in _parameters(rows).items()} for rows in (24, _HC)
    )
    mix = HyperMix(given["post"], given["post"], given["comb"])
    streams = write_streams(given["streams"], given["o"], mix)
    fn, base, scale, norm = step.values()
    read = hyper_read_reference(streams, fn, base, scale, norm, _CONSTANTS)
    ended = write_streams(streams, given["o"], HyperMix(read.post, read.post, read.comb))
    pre = head_mix(ended, head["fn"], head["base"], head["scale"], _CONSTANTS)
    seen = rms_norm_reference(read_streams(ended, pre), head["norm"], _CONSTANTS.norm_eps)
    return [read.x, read.post, read.comb, streams, seen[-1:], ended]


# ---- routing: by scores with a bias, and by a table ----


def _route_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, bias, the experts of each token id, token ids."""
    generator = torch.Generator().manual_seed(3)
    table = [torch.randperm(_EXPERTS, generator=generator)[:_CHOSEN] for _ in range(50)]
    ids = torch.randint(50, (9,), generator=generator)
    return 4 * draw(320, 9, _EXPERTS), draw(321, _EXPERTS), torch.stack(table).int(), ids


def _route(device: torch.device) -> list[Tensor]:
    logits, bias, table, token_ids = (part.to(device) for part in _route_inputs())
    results = []
    hashed: dict[str, Any] = {"table": table, "token_ids": token_ids}
    for given in ({}, hashed):
        ids = torch.full((9, _CHOSEN), -7, dtype=torch.int32, device=device)
        weights = unset(device, 9, _CHOSEN)
        route(ids, weights, logits, None if given else bias, scale=_SCALE, **given)
        results += [ids, weights]
    return results


def _routed() -> list[Tensor]:
    logits, bias, table, token_ids = _route_inputs()
    named = table[token_ids]
    weights = routing_weights(router_scores(logits.double()), named.long(), _SCALE)
    return [*route_reference(logits.double(), bias.double(), _CHOSEN, _SCALE), named, weights]


# ---- the choice of a token ----


def _logits() -> Tensor:
    """The last row has ties everywhere."""
    return torch.cat((2 * draw(330, 2, _VOCAB), draw(331, 1, _VOCAB).round()))


def _argmax(device: torch.device) -> list[Tensor]:
    ids = torch.full((3,), -9, dtype=torch.int32, device=device)
    size = argmax_work_ints(3, _VOCAB)
    argmax(ids, _logits().to(device), torch.empty(size, dtype=torch.int32, device=device))
    return [ids]


def _likeliest() -> list[Tensor]:
    return [torch.stack([(row == row.max()).nonzero()[0, 0] for row in _logits()])]


def _seen() -> SeenTokens:
    seen = SeenTokens.none(_VOCAB)
    seen.flags[::3] = True
    seen.generated[::6] = 2
    return seen


def _sample(device: torch.device) -> list[Tensor]:
    seen, work = _seen(), SamplingWork.allocate(_VOCAB, device)
    counts = TokenCounts(
        torch.from_numpy(seen.flags).to(device), torch.from_numpy(seen.generated).to(device), None
    )
    found = []
    for rules in (SamplingRules(options, _VOCAB) for options in _RULES):
        for u in _UNIFORM:
            ids = torch.full((1,), -9, dtype=torch.int32, device=device)
            work.options.copy_(torch.tensor(options_of(rules, u), dtype=torch.float64))
            sample(ids, _logits()[0].to(device), work, counts, rules)
            found.append(ids)
    return found


def _sampled() -> list[Tensor]:
    logits, seen = _logits()[0].numpy(), _seen()
    rules = [SamplingRules(options, _VOCAB) for options in _RULES]
    return [
        torch.tensor([sample_reference(logits, each, seen, u)]) for each in rules for u in _UNIFORM
    ]
