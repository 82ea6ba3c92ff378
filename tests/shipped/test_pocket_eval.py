"""The shipped model still can what its evaluation measured: a cut of it, without any corpus.

Each test runs some items and compares the number of right ones with the lowest number to expect of
the rate that `eval.json` states (`pocket.bounds`), so bad luck does not fail it.
"""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
from pocket import documents
from pocket.bounds import band
from pocket.documents import Document, DocumentEncoder
from pocket.judging import (
    Given,
    Watch,
    judge_given,
    judge_reply,
    judge_turns,
    open_model,
    random_selection,
    through_model,
    through_session,
)
from pocket.tasks.arithmetic import arithmetic_document
from pocket.tasks.fillers import Filler
from pocket.tasks.recall import recall_long
from pocket.tasks.stories import story_document
from pocket.tasks.tools import tool_document
from pocket.tasks.word_lists import list_document

import edgedsv4
from edgedsv4 import Engine, EngineOptions

FOLDER = Path(edgedsv4.__file__).parent / "data" / "pocket-v4"
MODEL = FOLDER / "pocket-v4.gguf"
FIGURES = json.loads((FOLDER / "eval.json").read_text("utf-8"))
SEED = 3_000_000
FEW = 0.01
"""Risk that a handful of greedy replies, always the same ones, lies below its band."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(MODEL, EngineOptions(threads=1)) as opened:
        yield opened


def measured(name: str, measure: str) -> tuple[float, int]:
    """Successes and items of a figure."""
    rows = FIGURES["runtime"]["rows"]
    row = next(row for row in rows if (row["name"], row["measure"]) == (name, measure))
    return row["value"] * row["n"], row["n"]


def recall_documents(engine: Engine, tokens: int, count: int, questions: int) -> Iterator[Given]:
    encoder = DocumentEncoder(engine.tokenizer)
    filler = Filler((), lambda text: len(encoder.text.encode(text)))
    for seed in range(SEED + tokens, SEED + tokens + count):
        document = recall_long(
            Random(seed), filler, tokens=tokens - 40, tier="T1", facts=8, questions=questions
        )
        yield Given.of(document, encoder)


def right_replies(
    engine: Engine, generator: Callable[[Random], Document], count: int
) -> tuple[int, int]:
    """Replies with the full score, and all, of the first checks of some documents."""
    right = 0
    with engine.new_session(context=2048) as session:
        for seed in range(SEED, SEED + count):
            document = generator(Random(seed))
            right += judge_reply(session, document, min(document.checks)).score == 1.0
    return right, count


# Alone on a slow or busy core the longest of these takes minutes.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tokens", "texts", "questions"), [(1024, 20, 1), (4096, 5, 4), (8192, 2, 2)]
)
def test_facts_are_found_far_outside_the_window(
    engine: Engine, tokens: int, texts: int, questions: int
) -> None:
    forced = through_session(engine)
    given = recall_documents(engine, tokens, texts, questions)
    answers = [turn for one in given for turn in judge_turns(forced, one)]
    lowest, _ = band(measured(f"recall-L-T1-{tokens}", "right answers"), len(answers))
    assert len(answers) == texts * questions
    assert sum(answer.is_exact for answer in answers) >= lowest


def test_random_rows_instead_of_the_indexers_lose_the_facts(engine: Engine) -> None:
    # 64 of 1,024 rows, so that a fact is rarely among them.
    with open_model(MODEL) as model:
        forced = through_model(model, random_selection(seed=1))
        given = recall_documents(engine, 4096, 2, 4)
        answers = [turn for one in given for turn in judge_turns(forced, one)]
    assert len(answers) == 8
    assert sum(answer.is_exact for answer in answers) <= 2


def test_stories_hold_the_animal_and_the_name_asked_for(engine: Engine) -> None:
    right, count = right_replies(engine, story_document, 12)
    rate = measured("stories", "all asked words in the reply")
    assert right >= band(rate, count, risk=FEW)[0] > 0


@pytest.mark.parametrize(("held_out", "most"), [(False, 1.05), (True, 1.5)])
def test_stories_are_predicted_nearly_as_well_as_they_can_be(
    engine: Engine, held_out: bool, most: float
) -> None:
    forced, encoder = through_session(engine), DocumentEncoder(engine.tokenizer)
    losses, tokens = 0.0, 0
    for seed in range(SEED, SEED + 20):
        given = Given.of(story_document(Random(seed), held_out=held_out), encoder)
        judged = judge_given(forced, given)
        losses, tokens = losses + judged.nll - given.nats, tokens + judged.tokens
    # Perplexity over the entropy floor; measured 1.01, and 1.44 where the patterns are new.
    assert math.exp(losses / tokens) < most


@pytest.mark.parametrize(("digits", "count"), [(2, 20), (3, 10)])
def test_sums_are_right_with_thinking(engine: Engine, digits: int, count: int) -> None:
    generator = partial(arithmetic_document, held_out=True, thinks=True, digits=digits)
    right, _ = right_replies(engine, generator, count)
    rate = measured(f"arith-{digits}-digits-thinking", "right replies")
    assert right >= band(rate, count, risk=FEW)[0] > 0


def test_words_are_copied(engine: Engine) -> None:
    generator = partial(list_document, kind="copy", longest=6)
    right, count = right_replies(engine, generator, 20)
    assert right >= band(measured("copy", "right replies"), count, risk=FEW)[0] > 0


def test_tools_are_called_with_the_right_arguments(engine: Engine) -> None:
    right, count = right_replies(engine, tool_document, 20)
    assert right >= band(measured("tools", "right replies"), count, risk=FEW)[0] > 0


def test_most_first_drafts_of_stories_are_accepted(engine: Engine) -> None:
    encoder = DocumentEncoder(engine.tokenizer)
    with open_model(MODEL, draft=FOLDER / "mtp-pocket-v4.gguf") as model:
        watch = Watch(model)
        for seed in range(SEED, SEED + 6):
            watch.add(Given.of(story_document(Random(seed)), encoder))
    rate = measured("stories", "first drafts accepted (n in tokens)")
    assert watch.accepted >= band(rate, watch.drafted)[0]


def test_the_notices_of_the_sources_travel_with_the_weights() -> None:
    builder = Path(documents.__file__).with_name("SOURCES.md").read_text("utf-8")
    notices = builder[builder.index("## WordNet 3.0") :]
    assert (FOLDER / "SOURCES.md").read_text("utf-8").endswith(notices)
    assert "Princeton" in notices
    assert "Python Software Foundation" in notices
