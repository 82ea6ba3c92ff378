"""`python -m pocket.tokenizer_build --corpus C --out DIR`: tokenizer.json and token counts.

Byte-level BPE of 4,096 entries with the pre-tokenizer of DeepSeek-V4. The added tokens stand at the
end, so every id differs from the real vocabulary and nothing can be looked up by number. Digits are
spaced out in the training text, so no token holds two of them.
"""

# ruff: noqa: RUF001 (the full-width bar is part of the token texts)

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from edgedsv4.errors import ConfigError
from edgedsv4.text.byte_alphabet import BYTE_OF_CHAR
from edgedsv4.text.special_tokens import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    PAD,
    SYSTEM,
    TASK_TOKENS,
    THINK,
    USER,
)
from edgedsv4.text.tokenizer import Tokenizer
from edgedsv4.text.vocabulary import SPLITS
from pocket.corpus import Corpus, load_corpus
from pocket.documents import ID_MASK, Document, TextEncoder, document_pieces
from pocket.mixtures import PHASES
from pocket.natural import NaturalTokens, training_corpus
from pocket.part_maker import PartMaker
from pocket.tasks import Tasks

logger = logging.getLogger(__name__)

VOCAB_SIZE = 4096
FIRST_TOKENS = (BOS, EOS, PAD)

LAST_TOKENS = (
    SYSTEM,
    USER,
    ASSISTANT,
    LATEST_REMINDER,
    THINK,
    END_THINK,
    DSML,
    *TASK_TOKENS.values(),
    "<｜image｜>",
    "<｜image2｜>",
    "<｜deepseek_image｜>",
)
_DIGIT = re.compile(r"(?<=\d)(?=\d)")
_CHARS_PER_TOKEN = 4
# Generated text repeats few words; natural text needs most of the vocabulary.
_WEIGHTS = {"prose": 7.0, "wordnet": 3.0}
_PROSE_WEIGHTS = {"sotu": 35, "austen": 35, "bible": 12, "python_docs": 10, "factbook_prose": 8}


def spaced_digits(text: str) -> str:
    """The text with a space between neighbouring digits."""
    return _DIGIT.sub(" ", text)


def sample_texts(corpus: Corpus, characters: int, seed: int = 0) -> Iterator[str]:
    """Training text of about so many characters, in the shares of phase A, more of it natural."""
    corpus = training_corpus(corpus)
    tasks = Tasks(corpus, lambda text: len(text) // _CHARS_PER_TOKEN)
    rng = Random(seed)
    prose: dict[str, list[Sequence[str]]] = {}
    for text in corpus.prose:
        prose.setdefault(text.source, []).append(text.paragraphs)
    shares = {task: share * _WEIGHTS.get(task, 1.0) for task, share in PHASES["A"].shares.items()}
    for task, share in shares.items():
        left = characters * share / sum(shares.values())
        while left > 0:
            if task == "prose":
                if not prose:
                    break
                sample = "\n\n".join(_run_of(rng, prose))
            elif task == "recall-L":
                # Its filler is prose and stories, which have their own shares.
                sample = _plain(tasks.generators["recall-S"](rng))
            elif task in tasks.generators:
                sample = _plain(tasks.generators[task](rng))
            else:
                break
            left -= len(sample)
            yield spaced_digits(sample)


def _run_of(rng: Random, prose: Mapping[str, Sequence[Sequence[str]]]) -> Sequence[str]:
    """Some paragraphs of one text."""
    source = rng.choices(list(prose), [_PROSE_WEIGHTS[name] for name in prose])[0]
    chosen = rng.choices(prose[source], [len(text) for text in prose[source]])[0]
    start = int(rng.random() * len(chosen))
    return chosen[start : start + 20]


def _plain(document: Document) -> str:
    return "\n".join(piece.text for piece in document_pieces(document) if not piece.is_special)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> dict[str, object]:
    """Train and return the content of `tokenizer.json`.

    Args:
        texts: training text, digits already spaced out.
        vocab_size: entries, added tokens included.

    Raises:
        ConfigError: the text gives fewer merges than the vocabulary has room for.
    """
    # Imported here as in the runtime: it takes a tenth of a second.
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    merges_and_bytes = vocab_size - len(FIRST_TOKENS) - len(LAST_TOKENS)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=merges_and_bytes,
        initial_alphabet=sorted(BYTE_OF_CHAR),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    document: dict[str, Any] = json.loads(bpe.to_str())
    vocab = sorted(document["model"]["vocab"].items(), key=lambda item: item[1])
    if len(vocab) != merges_and_bytes:
        raise ConfigError(f"the text gives {len(vocab)} tokens, {merges_and_bytes} are needed")
    first = len(FIRST_TOKENS)
    document["model"]["vocab"] = {text: i + first for i, (text, _) in enumerate(vocab)}
    added = [*enumerate(FIRST_TOKENS), *enumerate(LAST_TOKENS, vocab_size - len(LAST_TOKENS))]
    document["added_tokens"] = [_added(i, text) for i, text in added]
    return document


def _added(token_id: int, text: str) -> dict[str, object]:
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        # As in the real vocabulary, where the roles and the thinking pair are not special.
        "special": text in FIRST_TOKENS,
    }


def hash_tables(
    counts: Sequence[int] | np.ndarray, experts: int, k: int, layers: int, *, seed: int = 0
) -> np.ndarray:
    """Expert ids of each token for the hash-routed layers, balanced by token frequency.

    Tokens are taken from the most frequent on; each gets the `k` experts with the least load so
    far, ties broken by chance. The `k` experts of a token differ.

    Args:
        counts: how often each token occurs, [V].
        experts: routed experts of a layer.
        k: experts per token, at most `experts`.
        layers: number of tables, each drawn anew.
        seed: of the tie-break.

    Returns:
        int32 [layers, V, k].

    Raises:
        ConfigError: `k` is not 1..experts.
    """
    if not 1 <= k <= experts:
        raise ConfigError(f"experts per token must be 1..{experts}, found {k}")
    weights = np.maximum(np.asarray(counts, dtype=np.float64), 1e-3)
    tables = np.empty((layers, len(weights), k), dtype=np.int32)
    for layer in range(layers):
        rng = np.random.default_rng([seed, layer])
        load = np.zeros(experts)
        for token in np.lexsort((rng.random(len(weights)), -weights)):
            chosen = np.lexsort((rng.random(experts), load))[:k]
            load[chosen] += weights[token]
            tables[layer, token] = rng.permutation(chosen)
    return tables


def count_tokens(corpus: Corpus, tokenizer: Tokenizer, tokens: int) -> np.ndarray:
    """How often each token occurs in about so many tokens of phase A, int64 [V]."""
    corpus = training_corpus(corpus)
    natural = NaturalTokens.of(corpus.prose, TextEncoder(tokenizer))
    maker = PartMaker(corpus, tokenizer, natural)
    phase = PHASES["A"]
    size = max(tokens // phase.row_tokens, 1) * phase.row_tokens
    stored, _ = maker.part(phase, seed=0, index=1, parts=2, tokens=size)
    return np.bincount(stored & ID_MASK, minlength=tokenizer.vocab_size)


def main() -> None:
    """Parse the command line, train, count, write."""
    parser = argparse.ArgumentParser(prog="python -m pocket.tokenizer_build", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--megabytes", type=float, default=24, help="training text")
    parser.add_argument("--count-tokens", type=int, default=2_000_000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = load_corpus(arguments.corpus)
    document = train_tokenizer(sample_texts(corpus, int(arguments.megabytes * 1e6)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "tokenizer.json"
    path.write_text(
        json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    counts = count_tokens(corpus, Tokenizer.from_json(path), arguments.count_tokens)
    lines = json.dumps(counts.tolist(), separators=(",", ":")) + "\n"
    (arguments.out / "token_counts.json").write_text(lines, encoding="utf-8")
    logger.info("%s: %d tokens, %d never used", path, VOCAB_SIZE, int((counts == 0).sum()))


if __name__ == "__main__":
    main()
