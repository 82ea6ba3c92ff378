"""The validation sets: documents with expected answers.

Generators run with seeds from `VALIDATION_SEED` on; words, prose, problems and story patterns are
those that training leaves out. Short recall and the like are new by chance alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from pocket.documents import Document, TextEncoder
from pocket.natural import split_prose, training_corpus
from pocket.tasks import VALIDATION_SEED, Generator, Tasks
from pocket.tasks.arithmetic import arithmetic_document
from pocket.tasks.dictionary import meaning_document
from pocket.tasks.fillers import Filler
from pocket.tasks.identity import identity_document
from pocket.tasks.knowledge import factbook_document
from pocket.tasks.recall import recall_long, recall_short
from pocket.tasks.stories import story_document
from pocket.tasks.word_lists import list_document
from pocket.validation_file import Item

if TYPE_CHECKING:
    from edgedsv4.text.tokenizer import Tokenizer
    from pocket.corpus import Corpus, Prose

RECALL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
RECALL_MARGIN = 40
"""Room left for the question, so that the whole document fits the context it is named after."""
_PROSE_TOKENS = (1024, 4096)
_FACTS_BY_TIER = {"T1": 8, "T2": 8, "T3": 4}


def validation_items(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    items: int,
    wanted: Callable[[str], bool] = lambda _name: True,
) -> Iterator[Item]:
    """All validation documents, or those of some sets.

    Args:
        corpus: the whole archive.
        tokenizer: measures the filler of long recall.
        items: documents per set; sets of 16K tokens and more have a quarter of it.
        wanted: given the name of a set, whether to make its documents; they do not depend on what
            other sets are made.
    """
    encoder = TextEncoder(tokenizer)
    _, held_out = split_prose(corpus.prose)

    def count(text: str) -> int:
        return len(encoder.encode(text))

    tasks = Tasks(training_corpus(corpus), count)
    for name, generator, size in _sets(tasks, Filler(held_out, count), items):
        for i in range(size if wanted(name) else 0):
            seed = VALIDATION_SEED + zlib.crc32(name.encode()) % 10**6 * 1000 + i
            yield Item(name, seed, generator(Random(seed)))
    for text in held_out:
        if any(wanted(f"prose-{text.source}-{size}") for size in _PROSE_TOKENS):
            yield from (item for item in _prose_items(text, encoder) if wanted(item.set_name))


def _sets(tasks: Tasks, filler: Filler, items: int) -> Iterator[tuple[str, Generator, int]]:
    """Name, generator and size of each set of chat documents."""
    sets: dict[str, Generator] = {
        "stories": story_document,
        "stories-held-out-patterns": partial(story_document, held_out=True),
        "arith-2-digits": _arithmetic(2, thinks=False),
        "arith-3-digits": _arithmetic(3, thinks=False),
        "arith-2-digits-thinking": _arithmetic(2, thinks=True),
        "arith-3-digits-thinking": _arithmetic(3, thinks=True),
        "copy": partial(list_document, kind="copy", longest=6),
        "reverse": partial(list_document, kind="reverse", longest=6),
        "sort": partial(list_document, kind="sort", longest=6),
        "uppercase": partial(list_document, kind="uppercase"),
        "identity": partial(identity_document, who_only=True),
    }
    for name in ("spell", "last-write", "tools", "json", "small-talk", "definitions", "factbook"):
        if name in tasks.generators:
            sets[name] = tasks.generators[name]
    if tasks.corpus.countries:
        sets["factbook-capitals"] = partial(
            factbook_document, countries=tasks.corpus.countries, only=("capital",)
        )
    for name, entries in (
        ("wordnet-common", tasks.dictionary.common),
        ("wordnet-held-out", tasks.dictionary.held_out),
    ):
        if entries:
            sets[name] = partial(meaning_document, entries=entries, task=name)
    for facts in (5, 20, 40):
        sets[f"recall-S-T1-{facts}"] = partial(recall_short, tier="T1", facts=facts)
    for name, generator in sets.items():
        yield name, generator, items
    for tokens in RECALL_TOKENS:
        for tier, facts in _FACTS_BY_TIER.items():
            generator = partial(
                recall_long, filler=filler, tokens=tokens - RECALL_MARGIN, tier=tier, facts=facts,
                questions=1,
            )  # fmt: skip
            size = items if tokens < 16384 else -(-items // 4)
            yield f"recall-L-{tier}-{tokens}", generator, size


def _arithmetic(digits: int, *, thinks: bool) -> Generator:
    return partial(arithmetic_document, held_out=True, thinks=thinks, digits=digits)


def _prose_items(text: Prose, encoder: TextEncoder) -> Iterator[Item]:
    """A held-out text in pieces of about 1,000 and of about 4,000 tokens."""
    for size in _PROSE_TOKENS:
        piece: list[str] = []
        left = size - 2
        for paragraph in text.paragraphs:
            length = len(encoder.encode(paragraph + "\n\n"))
            if length > left and piece:
                yield _prose_item(text, size, piece)
                piece, left = [], size - 2
            piece.append(paragraph)
            left -= length
        if piece and size == 1024:
            yield _prose_item(text, size, piece)


def _prose_item(text: Prose, size: int, paragraphs: list[str]) -> Item:
    document = Document(task="prose", text="\n\n".join(paragraphs) + "\n\n")
    return Item(f"prose-{text.source}-{size}", 0, document)
