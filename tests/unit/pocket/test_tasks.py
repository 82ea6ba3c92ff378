"""The seeded generators: their answers are right, their floors exact, nothing held out is drawn."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random

import pytest
from pocket import documents
from pocket.corpus import Corpus, Entry, Prose
from pocket.documents import Document, DocumentEncoder
from pocket.tasks import Tasks, arithmetic, dictionary
from pocket.tasks.arithmetic import arithmetic_document, draw_problem, steps
from pocket.tasks.dictionary import Dictionary
from pocket.tasks.draw import Draw
from pocket.tasks.fillers import Filler
from pocket.tasks.identity import (
    WHO_ANSWER,
    WHO_QUESTIONS,
    has_own_answer,
    identity_document,
)
from pocket.tasks.lexicon import ANIMALS, CODE_WORDS, NAMES
from pocket.tasks.recall import last_write, recall_long, recall_short
from pocket.tasks.scoring import SCORERS, content_f1, score
from pocket.tasks.stories import draw_hero, draw_story, story_document
from pocket.tasks.story_grammar import COMMON, PLOTS, SLOTS
from pocket.tasks.tools import tool_document
from pocket.tasks.word_lists import list_document

from edgedsv4.errors import ConfigError
from edgedsv4.text.prompt import render_prompt
from edgedsv4.text.reply import ReplyParser
from edgedsv4.text.special_tokens import EOS
from edgedsv4.text.tokenizer import Tokenizer

WORDS = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(600)]
CORPUS = Corpus(
    prose=[Prose("sotu", "1900-A", [f"Line {w} goes on. It ends here. So it is." for w in WORDS])],
    entries=[
        Entry(word, "noun", max(0, 300 - i), f"the {i}th thing", f"see {word} run", ("same",), "x")
        for i, word in enumerate(WORDS)
    ],
    definitions=[("jargon", "hack", "A quick job."), ("devil", "year", "Disappointments.")],
    countries={"France": {"capital": "Paris", "languages": "French"}, "Peru": {"capital": "Lima"}},
    conversations=[
        ("Hi", "Hey."),
        ("Tell me a joke.", "No."),
        ("Is it late?", "Yes.", "Another one.", "No."),
    ],
    puzzles=[("gcd", "GCD of 4 and 6?", "2")],
)


def words(text: str) -> int:
    return len(text.split())


TASKS = Tasks(CORPUS, words)
GENERATORS = {
    **TASKS.generators,
    "recall-L": lambda rng: TASKS.recall_long(rng, 300),
    "stories-held-out": partial(story_document, held_out=True),
}


@cache
def encoder() -> DocumentEncoder:
    path = Path(documents.__file__).parent / "data" / "tokenizer.json"
    return DocumentEncoder(Tokenizer.from_json(path))


def reply_in(document: Document, index: int) -> tuple[str, str]:
    """What the document says in place of a reply: text, or calls as JSON, through the parser."""
    options = document.options()
    prompt = render_prompt(document.messages[:index], options=options)
    through = render_prompt(document.messages[: index + 1], options=options).text
    assert through.startswith(prompt.text)
    parser = ReplyParser(starts_in=prompt.opens_in)
    parser.push(through[len(prompt.text) :].removesuffix(EOS))
    parser.finish()
    calls = [[call.name, json.loads(call.arguments)] for call in parser.reply.tool_calls]
    return parser.reply.text, json.dumps(calls)


@pytest.mark.parametrize("task", GENERATORS)
def test_the_documents_own_answers_score_full_marks(task: str) -> None:
    for seed in range(40):
        document = GENERATORS[task](Random(seed))
        assert document.checks
        for index, check in document.checks.items():
            if document.thinking != "none" and index != len(document.messages) - 1:
                continue
            text, calls = reply_in(document, index)
            said = calls if check.scorer == "tool_call" else text
            assert score(check.scorer, said, check.expected) == 1.0, (document, index)


@pytest.mark.parametrize("task", GENERATORS)
def test_a_seed_gives_one_document(task: str) -> None:
    assert GENERATORS[task](Random(5)) == GENERATORS[task](Random(5))


@pytest.mark.parametrize("task", sorted({*GENERATORS} - {"definitions", "puzzles"}))
def test_every_task_has_thinking_and_plain_documents(task: str) -> None:
    assert {GENERATORS[task](Random(seed)).thinking for seed in range(100)} == {"none", "high"}


def test_tasks_without_a_source_are_left_out() -> None:
    alone = Tasks(Corpus(), words)
    assert {"stories", "arith", "recall-S", "tools", "spell"} <= set(alone.generators)
    assert not {"wordnet", "factbook", "small-talk", "puzzles"} & set(alone.generators)
    assert "recall-L" in alone.recall_long(Random(1), 300).task


def test_some_chats_have_a_system_message() -> None:
    found = [TASKS.generators["stories"](Random(seed)) for seed in range(400)]
    systems = [document for document in found if document.messages[0].role == "system"]
    assert 10 < len(systems) < 70
    assert all(min(document.checks) == 2 for document in systems)


def test_small_talk_leaves_questions_about_the_model_to_the_identity_task() -> None:
    assert has_own_answer("WHO ARE YOU")
    assert not has_own_answer("Who are they?")
    first = {str(GENERATORS["small-talk"](Random(seed)).messages[-2].content)
             for seed in range(40)}  # fmt: skip
    assert first == {"Tell me a joke.", "Another one."}


def test_draws_add_up_their_surprise() -> None:
    draw = Draw(Random(1))
    draw.pick("abcd")
    draw.integer(0, 9)
    draw.sample("xyz", 2)
    assert draw.nats == pytest.approx(math.log(4) + math.log(10) + math.log(6))


def test_a_likely_outcome_costs_little() -> None:
    draw = Draw(Random(1))
    hits = sum(draw.chance(0.9) for _ in range(100))
    assert draw.nats == pytest.approx(-hits * math.log(0.9) - (100 - hits) * math.log(0.1))


def test_weighted_choices_follow_their_weights() -> None:
    draw = Draw(Random(1))
    picked = Counter(draw.weighted("ab", (3, 1)) for _ in range(400))
    expected = -picked["a"] * math.log(0.75) - picked["b"] * math.log(0.25)
    assert 250 < picked["a"] < 350
    assert draw.nats == pytest.approx(expected)


def test_story_floor_is_at_least_a_third_of_a_nat_per_token() -> None:
    for held_out in (False, True):
        found = [story_document(Random(seed), held_out=held_out) for seed in range(300)]
        tokens = sum(len(encoder().encode(document)) - 1 for document in found)
        assert sum(document.nats for document in found) / tokens >= 0.35


def test_story_floor_is_paid_by_the_text_alone() -> None:
    # Two stories with equal texts must have equal floors: then the floor is that of the text.
    floors: dict[str, float] = {}
    for seed in range(2000):
        draw = Draw(Random(seed))
        text = draw_story(draw, draw_hero(draw)).text
        assert floors.setdefault(text, draw.nats) == draw.nats
    assert len(floors) == 2000


def test_there_are_more_than_ten_million_stories() -> None:
    required = ("opening", "meeting", "ending", "lost.problem", "lost.action", "lost.resolution")
    assert math.prod(len(SLOTS[name].train) for name in required) > 10**12


def test_every_slot_has_forty_distinct_patterns() -> None:
    for name, slot in SLOTS.items():
        patterns = (*slot.train, *slot.held_out)
        assert len(set(patterns)) == len(patterns), name
        assert len(slot.train) >= 40, name


def test_about_a_fifth_of_the_patterns_is_held_out() -> None:
    held_out = sum(len(slot.held_out) for slot in SLOTS.values())
    total = sum(len(slot.train) + len(slot.held_out) for slot in SLOTS.values())
    assert 0.15 < held_out / total < 0.25


def test_every_part_occurs_in_training() -> None:
    slots = {**COMMON, **{f"{plot}.{name}": parts for plot, of in PLOTS.items()
                          for name, parts in of.items()}}  # fmt: skip
    for name, parts in slots.items():
        joined = "\n".join(SLOTS[name].train)
        assert all(text in joined for part in parts for text in part), name


def test_training_stories_use_no_held_out_pattern() -> None:
    endings = [
        pattern.replace("{m}", ".*").replace("{p}", ".*")
        for pattern in SLOTS["ending"].held_out
        if "{N}" not in pattern
    ]
    matcher = re.compile("(?:" + "|".join(endings) + ")$")
    for seed in range(300):
        draw = Draw(Random(seed))
        assert not matcher.search(draw_story(draw, draw_hero(draw)).text)
    draw = Draw(Random(1))
    assert any(
        matcher.search(draw_story(draw, draw_hero(draw), held_out=True).text) for _ in range(50)
    )


def test_stories_leave_no_field_open_and_name_their_hero() -> None:
    for seed in range(300):
        draw = Draw(Random(seed))
        hero = draw_hero(draw)
        story = draw_story(draw, hero)
        assert "{" not in story.text
        assert hero["N"] in story.text
        assert re.search(rf"\b{hero['n']}\b", story.text)
        assert len(re.findall(r"[.?!]", story.text)) >= 6


def test_answers_to_follow_up_questions_stand_in_the_story() -> None:
    small = {"is", "a", "an", "the", "it", "about", "lives", "near", "likes", "to", "they", "ate",
             "lost"}  # fmt: skip
    for seed in range(200):
        draw = Draw(Random(seed))
        story = draw_story(draw, draw_hero(draw))
        for _, answer in story.questions:
            asked = {w for w in re.findall(r"\w+", answer) if w.lower() not in small}
            assert asked <= set(re.findall(r"\w+", story.text)), (answer, story.text)


@pytest.mark.parametrize("operator", "+-*")
def test_every_step_of_the_thinking_is_true(operator: str) -> None:
    rng = Random(1)
    for _ in range(300):
        a, b = rng.randrange(1000), rng.randrange(1000)
        text = steps(a, operator, b)
        claims = re.findall(r"(\d+(?: [-+*] -?\d+)+) = (-?\d+)(?: \*)?", text)
        for left, right in claims:
            value = 0
            terms = re.split(r" ([-+]) ", left)
            for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True):
                value += (1 if sign == "+" else -1) * math.prod(map(int, term.split(" * ")))
            follows = re.search(re.escape(f"{left} = {right} *"), text)
            assert value == int(right) or follows, (text, left)
        result = {"+": a + b, "-": a - b, "*": a * b}[operator]
        assert text.endswith(f"{a} {operator} {b} = {result}.")


def test_training_never_sees_a_held_out_sum() -> None:
    draw = Draw(Random(1))
    for _ in range(3000):
        assert not arithmetic.is_held_out(*draw_problem(draw, held_out=False))


def test_held_out_sums_are_held_out() -> None:
    draw = Draw(Random(1))
    for digits in (2, 3):
        for _ in range(30):
            problem = draw_problem(draw, held_out=True, digits=digits)
            assert arithmetic.is_held_out(*problem)


def test_a_twentieth_of_the_two_digit_sums_is_held_out() -> None:
    problems = product(range(10, 100), "+-", range(10, 100))
    share = sum(arithmetic.is_held_out(*problem) for problem in problems) / (2 * 90 * 90)
    assert 0.04 < share < 0.06


def test_thinking_holds_the_answer() -> None:
    for seed in range(50):
        document = arithmetic_document(Random(seed), thinks=True)
        last = document.messages[-1]
        assert str(last.content).split("= ")[1] in last.reasoning


@pytest.mark.parametrize(
    ("kind", "said", "answer"),
    [("reverse", "a b c", "c b a"), ("sort", "b a c", "a b c"), ("uppercase", "ab c", "AB C")],
)
def test_word_lists_are_answered_rightly(kind: str, said: str, answer: str) -> None:
    from pocket.tasks.word_lists import _DOES

    assert list(_DOES[kind](said.split())) == answer.split()


def test_word_lists_keep_to_their_longest() -> None:
    for seed in range(50):
        document = list_document(Random(seed), kind="reverse", longest=6)
        assert all(2 <= len(re.findall(r"\w+", c.expected)) <= 6 for c in document.checks.values())


def test_short_recall_states_each_asked_fact_once() -> None:
    for seed in range(100):
        document = recall_short(Random(seed), facts=12)
        context = str(document.messages[0].content)
        for index in document.checks:
            question = str(document.messages[index - 1].content).rsplit("\n", 1)[-1]
            name = next(n for n in NAMES if re.search(rf"\b{n}\b", question))
            facts = context[: context.rfind("\n")]
            assert len(re.findall(rf"\b{name}\b", facts)) == 1


@pytest.mark.parametrize(
    ("tier", "pattern"), [("T1", "[a-z]+"), ("T2", r"\d{3}"), ("T3", r"\d{6}")]
)
def test_values_follow_their_tier(tier: str, pattern: str) -> None:
    document = recall_short(Random(1), tier=tier)
    assert all(re.fullmatch(pattern, check.expected) for check in document.checks.values())


@pytest.mark.parametrize("tokens", [200, 512, 2048, 16000])
def test_long_recall_fills_the_length_it_is_given(tokens: int) -> None:
    filler = Filler(CORPUS.prose, lambda text: len(encoder().text.encode(text)))
    for seed in range(4):
        document = recall_long(Random(seed), filler, tokens=tokens, facts=3, questions=1)
        assert 0.7 * tokens - 30 < len(encoder().encode(document)) <= tokens + 40


def test_facts_of_long_recall_lie_at_every_depth() -> None:
    filler = Filler((), words)
    depths = []
    for seed in range(200):
        document = recall_long(Random(seed), filler, tokens=800, facts=1, questions=1, tier="T3")
        context = str(document.messages[0].content)
        depths.append(context.index(document.checks[1].expected) / len(context))
    assert min(depths) < 0.1
    assert max(depths) > 0.85
    assert 0.4 < sum(depths) / len(depths) < 0.6


def test_filler_of_tables_falls_back_to_stories() -> None:
    filler = Filler([Prose("sotu", "t", ["1 2 3 4 5 6"])], words)
    for seed in range(4):
        assert words(" ".join(filler.sentences(Random(seed), 100))) > 60


def test_filler_never_exceeds_its_room() -> None:
    filler = Filler(CORPUS.prose, words)
    for seed in range(30):
        assert sum(map(words, filler.sentences(Random(seed), 100))) <= 100


def test_last_write_expects_the_newest_value() -> None:
    for seed in range(100):
        document = last_write(Random(seed))
        lines = str(document.messages[0].content)
        for index, check in document.checks.items():
            question = str(document.messages[index - 1].content).rsplit("\n", 1)[-1]
            name = next(n for n in NAMES if re.search(rf"\b{n}\b", question))
            values = re.findall(rf"of {name} is(?: now)? (\w+)\.", lines)
            expected = ", ".join(values) if question.startswith("List") else values[-1]
            assert check.expected == expected


def test_the_model_says_who_it_is() -> None:
    assert WHO_ANSWER == "I am the edgedsv4 pocket model. I only know simple things."
    asked = {str(identity_document(Random(seed), who_only=True).messages[0].content)
             for seed in range(300)}  # fmt: skip
    assert asked == set(WHO_QUESTIONS)


def test_some_questions_with_tools_need_none() -> None:
    needs = [any(m.tool_calls for m in tool_document(Random(seed)).messages) for seed in range(100)]
    assert 0.7 < sum(needs) / 100 < 1.0


def test_common_words_are_drawn_half_of_the_time() -> None:
    entries = [Entry(f"w{i}", "noun", 5000 - i, "thing", "", (), "") for i in range(4000)]
    draw, found = Draw(Random(1)), Dictionary(entries)
    assert len(found.common) == 2000
    common = {entry.word for entry in found.common}
    share = sum(found.draw(draw).word in common for _ in range(1000)) / 1000
    assert 0.4 < share < 0.6


def test_held_out_words_are_never_drawn() -> None:
    entries = [Entry(f"w{i}", "noun", 0, "thing", "", (), "") for i in range(1000)]
    found = Dictionary(entries)
    assert 5 < len(found.held_out) < 50
    draw = Draw(Random(1))
    assert not [1 for _ in range(3000) if dictionary.is_held_out(found.draw(draw).word)]


def test_common_words_are_never_held_out() -> None:
    entries = [Entry(f"w{i}", "noun", 9, "thing", "", (), "") for i in range(500)]
    assert len(Dictionary(entries).common) == 500
    assert not Dictionary(entries).held_out


@pytest.mark.parametrize(
    ("scorer", "reply", "expected", "mark"),
    [
        ("exact", " yes ", "yes", 1.0), ("exact", "Yes", "yes", 0.0),
        ("contains", "It is Paris.", "paris", 1.0), ("contains", "It is Rome.", "Paris", 0.0),
        ("number", "12 + 7 = 19", "19", 1.0), ("number", "3 - 5 = -2.", "-2", 1.0),
        ("number", "none", "2", 0.0), ("number", "1,024", "1024", 1.0),
        ("words", "a, b", "a b", 1.0), ("words", "b a", "a b", 0.0),
        ("mentions", "Mia the fox", "Mia|fox", 1.0), ("mentions", "Mia", "Mia|fox", 0.5),
        ("mentions", "foxes", "fox", 0.0), ("mentions", "A story.", "", 1.0),
        ("mentions", " ", "", 0.0),
        ("json", '{"a":1}', '{"a": 1}', 1.0), ("json", "{", "{}", 0.0),
        ("tool_call", '[["f", {}]]', '[["f", {}]]', 1.0), ("f1", "", "a dog", 0.0),
        ("f1", "a domestic animal", "a domestic animal", 1.0),
    ],
)  # fmt: skip
def test_scorers_judge(scorer: str, reply: str, expected: str, mark: float) -> None:
    assert score(scorer, reply, expected) == mark


def test_f1_weighs_content_words_only() -> None:
    assert content_f1("the big dog", "a dog of old") == pytest.approx(0.5)


def test_an_unknown_scorer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exact.*found 'best'"):
        score("best", "", "")
    assert "best" not in SCORERS


def test_word_lists_hold_no_word_twice() -> None:
    for listed in (NAMES, ANIMALS, CODE_WORDS):
        assert len(set(listed)) == len(listed)
