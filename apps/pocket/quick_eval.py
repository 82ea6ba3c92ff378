"""`python -m pocket.quick_eval`: judges trained weights on validation documents, teacher-forced.

Every document runs once through the network. Per set: perplexity and accuracy over target tokens,
the share of documents whose targets all got the largest logit (greedy decoding would have written
exactly them), how often the MTP block's first and second draft are what the main model says next,
and the load of the experts. No decoding, so it takes seconds on a GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from edgedsv4.errors import Dsv4Error
from edgedsv4.text.tokenizer import Tokenizer
from pocket.configs import CONFIGS, named_config
from pocket.documents import DocumentEncoder
from pocket.expert_probe import choose_expert_path
from pocket.export import load_weights
from pocket.network import Mode, Network
from pocket.store import TARGET_BIT, TOKEN_MASK
from pocket.validation_file import read_items

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One validation document."""

    set_name: str
    codes: npt.NDArray[np.uint16]
    nats: float
    """Entropy floor of its targets."""


@dataclass
class Score:
    """Sums over the documents of one set."""

    documents: int = 0
    exact: float = 0
    tokens: float = 0
    right: float = 0
    loss: float = 0
    floor: float = 0
    drafts: list[float] = field(default_factory=lambda: [0.0, 0.0])
    drafted: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def summary(self) -> dict[str, float]:
        """Rates and means."""
        tokens = max(1.0, self.tokens)
        accepted = [d / max(1.0, n) for d, n in zip(self.drafts, self.drafted, strict=True)]
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "exact": round(self.exact / max(1, self.documents), 4),
            "token_accuracy": round(self.right / tokens, 4),
            "perplexity": round(math.exp(min(20.0, self.loss / tokens)), 4),
            "floor_perplexity": round(math.exp(min(20.0, self.floor / tokens)), 4),
            "draft1": round(accepted[0], 4),
            "draft2": round(accepted[1], 4),
        }


def read_samples(path: Path, tokenizer: Path, *, per_set: int, longest: int) -> list[Sample]:
    """The first documents of every set.

    Args:
        path: validation file, or its folder.
        tokenizer: its `tokenizer.json`.
        per_set: documents per set at most.
        longest: documents of more tokens are left out.
    """
    encoder = DocumentEncoder(Tokenizer.from_json(tokenizer))
    taken: dict[str, int] = defaultdict(int)
    samples = []
    for item in read_items(path):
        if taken[item.set_name] >= per_set:
            continue
        codes = encoder.encode(item.document)
        if len(codes) > longest:
            continue
        taken[item.set_name] += 1
        samples.append(Sample(item.set_name, codes, item.document.answer_nats))
    return samples


def batches(samples: Iterable[Sample], tokens: int) -> Iterator[list[Sample]]:
    """Documents of like length together, at most `tokens` tokens with padding."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.codes)):
        if batch and (len(batch) + 1) * len(sample.codes) > tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


@dataclass
class Evaluation:
    """Scores by set, and tokens per expert."""

    scores: dict[str, Score]
    loads: Tensor

    def report(self) -> dict[str, Any]:
        """For `eval.json`."""
        ratios = self.loads.amax(dim=1) / self.loads.mean(dim=1).clamp(min=1e-9)
        return {
            "sets": {name: score.summary() for name, score in sorted(self.scores.items())},
            "load_max_over_mean": [round(float(ratio), 3) for ratio in ratios],
        }


@torch.no_grad()
def evaluate(
    network: Network,
    samples: Sequence[Sample],
    mode: Mode,
    *,
    batch_tokens: int,
    deadline: float = math.inf,
) -> Evaluation:
    """Score documents.

    Args:
        network: to judge.
        samples: the documents.
        mode: how it runs.
        batch_tokens: tokens at once, padding included.
        deadline: `time.monotonic()` after which no new batch is begun.
    """
    config = network.config
    layers = config.num_layers + 1
    result = Evaluation(defaultdict(Score), torch.zeros(layers, config.num_experts))
    # Short documents first: a deadline cuts the longest.
    for batch in batches(samples, batch_tokens):
        if time.monotonic() > deadline:
            logger.warning("out of time before documents of %d tokens", len(batch[0].codes))
            break
        _add_batch(network, batch, mode, result)
    return result


def _add_batch(network: Network, batch: list[Sample], mode: Mode, result: Evaluation) -> None:
    length = max(len(sample.codes) for sample in batch)
    codes = np.full((len(batch), length + 1), network.config.pad_id or 0, dtype=np.int64)
    for row, sample in enumerate(batch):
        codes[row, : len(sample.codes)] = sample.codes
    tokens = torch.from_numpy(codes & TOKEN_MASK).to(network.device)
    is_target = torch.from_numpy((codes & TARGET_BIT) != 0).to(network.device)
    sequences = network.sequences(tokens[:, :-1], mode)
    padded = sequences.tokens.shape[1]

    def widened(values: Tensor, shift: int) -> Tensor:
        cut = values[:, shift:]
        return functional.pad(cut, (0, padded - cut.shape[1]))[:, :padded]

    targets, weights = widened(tokens, 1), widened(is_target, 1)
    streams = network.trunk(sequences)
    loss, said = _read(network, streams, targets, is_draft=False)
    right = (said == targets) & weights
    drafted = []
    for step in (1, 2):
        streams = network.draft(streams, widened(tokens, step), sequences)
        _, draft = _read(network, streams, widened(tokens, step + 1), is_draft=True)
        agrees = functional.pad(draft[:, :-step] == said[:, step:], (0, step))
        counted = functional.pad(weights[:, step:], (0, step))
        drafted.append((agrees & counted, counted))
    result.loads += torch.stack(
        [sequences.watched.loads[layer].cpu() for layer in range(result.loads.shape[0])]
    )
    columns = [
        (right | ~weights).all(dim=1),
        weights.sum(dim=1),
        right.sum(dim=1),
        (loss * weights).sum(dim=1),
        *(part.sum(dim=1) for pair in drafted for part in pair),
    ]
    rows = torch.stack([column.double() for column in columns], dim=1).tolist()
    for sample, values in zip(batch, rows, strict=True):
        _add_document(result.scores[sample.set_name], sample, values)


def _add_document(score: Score, sample: Sample, values: Sequence[float]) -> None:
    score.documents += 1
    score.floor += sample.nats
    score.exact += values[0]
    score.tokens += values[1]
    score.right += values[2]
    score.loss += values[3]
    for step in (0, 1):
        score.drafts[step] += values[4 + 2 * step]
        score.drafted[step] += values[5 + 2 * step]


def _read(
    network: Network, streams: Tensor, targets: Tensor, *, is_draft: bool
) -> tuple[Tensor, Tensor]:
    """Cross entropy and likeliest token of every position, [B, S] each, some rows at a time."""
    losses, tokens = [], []
    parts = zip(torch.split(streams, 16384), torch.split(targets.flatten(), 16384), strict=True)
    for part, target in parts:
        logits = network.logits(part, is_draft=is_draft)
        losses.append(functional.cross_entropy(logits, target, reduction="none"))
        tokens.append(logits.argmax(dim=-1))
    return torch.cat(losses).view_as(targets), torch.cat(tokens).view_as(targets)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = _parser().parse_args(arguments)
    deadline = time.monotonic() + args.until
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    try:
        weights = load_weights(args.source, args.config)
        samples = read_samples(
            args.validation, args.tokenizer, per_set=args.per_set, longest=args.longest
        )
        samples = [sample for sample in samples if sample.set_name.startswith(args.sets)]
    except Dsv4Error as error:
        logger.error("%s", error)
        return 2
    network = Network(named_config(args.config), {n: w.to(device) for n, w in weights.items()})
    mode = Mode(
        dtype=torch.bfloat16 if is_gpu else torch.float32,
        selection=args.selection,
        is_quantised=args.quantised,
        expert_path=choose_expert_path("auto", device),
        query_block=2048,
    )
    result = evaluate(
        network, samples, mode, batch_tokens=65536 if is_gpu else 2048, deadline=deadline
    ).report()
    result |= {"selection": args.selection, "is_quantised": args.quantised}
    for name, score in result["sets"].items():
        logger.info(
            "%-28s n %4d exact %.3f token %.3f ppl %8.3f floor %7.3f draft %.3f %.3f",
            *(name, score["documents"], score["exact"], score["token_accuracy"]),
            *(score["perplexity"], score["floor_perplexity"], score["draft1"], score["draft2"]),
        )
    logger.info("expert load max/mean by layer: %s", result["load_max_over_mean"])
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pocket.quick_eval", description=__doc__)
    parser.add_argument("source", type=Path, help="directory of a state.pt, or of shards")
    parser.add_argument("--config", choices=list(CONFIGS), default="pocket-v4")
    parser.add_argument("--validation", type=Path, required=True, help="file, or its folder")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--per-set", type=int, default=200)
    parser.add_argument("--sets", default="", help="only sets whose names start so")
    parser.add_argument("--longest", type=int, default=17000, help="tokens of a document")
    parser.add_argument("--selection", choices=["sparse", "dense", "random"], default="sparse")
    parser.add_argument("--quantised", action="store_true", help="round as the shipped model does")
    parser.add_argument("--until", type=float, default=120.0, help="seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
