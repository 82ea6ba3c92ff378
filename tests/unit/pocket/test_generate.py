"""Token stores: packing, parts, shares, curriculum, resuming; validation files."""

# ruff: noqa: RUF001 (the full-width bar is part of the token texts)

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from pocket import documents, generate
from pocket.corpus import Corpus, Entry, Prose, write_archive
from pocket.documents import ID_MASK, TARGET, TextEncoder, document_pieces
from pocket.generate import StorePlan, natural_tokens, token_number, write_store
from pocket.mixtures import PHASES, TASKS, Phase
from pocket.natural import NaturalTokens, split_prose, training_corpus
from pocket.packing import RowPacker
from pocket.part_maker import PartMaker, part_seed
from pocket.tasks import VALIDATION_SEED, dictionary
from pocket.validation import validation_items
from pocket.validation_file import Item, read_items, write_items

from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.text.tokenizer import Tokenizer

TOKENIZER = Path(documents.__file__).parent / "data" / "tokenizer.json"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(TOKENIZER)


def novel(title: str, count: int = 40) -> Prose:
    return Prose(
        "austen", title, [f"{title} went on to chapter {i}. So it was." for i in range(count)]
    )


@cache
def corpus() -> Corpus:
    return Corpus(
        prose=[
            novel("Emma", 400),
            novel("Northanger Abbey"),
            Prose("sotu", "1900-A-1", ["The year was good."] * 300),
            Prose("sotu", "1901-B-1", ["Secret speech."] * 300),
        ],
        entries=[Entry(f"word{i}", "noun", 3000 - i, "a thing", "", (), "") for i in range(3000)],
        countries={"France": {"capital": "Paris"}},
    )


@cache
def maker() -> PartMaker:
    training = training_corpus(corpus())
    natural = NaturalTokens.of(training.prose, TextEncoder(tokenizer()))
    return PartMaker(training, tokenizer(), natural)


def part(phase: str, *, index: int = 0, parts: int = 10, rows: int = 20) -> np.ndarray:
    tokens = rows * PHASES[phase].row_tokens
    return maker().part(PHASES[phase], seed=1, index=index, parts=parts, tokens=tokens)[0]


def texts_of(stored: np.ndarray) -> Iterator[str]:
    ids = stored & ID_MASK
    for piece in np.split(ids, np.flatnonzero(ids == 0)[1:]):
        yield tokenizer().decode(piece.tolist(), show_control=True)


@pytest.mark.parametrize("phase", ["A", "B", "D"])
def test_every_row_begins_with_a_document(phase: str) -> None:
    rows = part(phase, rows=8).reshape(-1, PHASES[phase].row_tokens)
    assert (rows[:, 0] == 0).all()


def test_chat_documents_are_never_cut() -> None:
    user, eos = tokenizer().id_of("<｜User｜>"), 1
    for text in np.split(part("A"), np.flatnonzero(part("A") & ID_MASK == 0)[1:]):
        ids = text & ID_MASK
        if user in ids:
            assert ids[-1] == eos


def test_a_part_depends_on_seed_phase_and_number_only() -> None:
    first = part("A", rows=4)
    part("B", rows=2)
    np.testing.assert_array_equal(first, part("A", rows=4))
    assert (first != part("A", index=1, rows=4)).any()


def test_training_seeds_stay_below_those_of_validation() -> None:
    seeds = {part_seed(1, "A", i) for i in range(500)}
    assert len(seeds) > 490
    assert max(seeds) < VALIDATION_SEED


def test_shares_are_met() -> None:
    _, made = maker().part(PHASES["A"], seed=1, index=5, parts=10, tokens=200 * 1024)
    known = {task: share for task, share in PHASES["A"].shares.items() if task in made}
    total = sum(made.values())
    for task, share in known.items():
        expected = share / sum(known.values())
        assert made[task] / total == pytest.approx(expected, abs=0.02), task


def test_every_mixture_adds_up_to_a_hundred() -> None:
    for phase in PHASES.values():
        assert sum(phase.shares.values()) == pytest.approx(100)
        assert set(phase.shares) == set(TASKS)


def longest_recall(stored: np.ndarray) -> int:
    ids = stored & ID_MASK
    lengths = np.diff([*np.flatnonzero(ids == 0), len(ids)])
    return int(lengths.max())


def test_long_recall_starts_short() -> None:
    phase = Phase("C", 4096, (300, 3000))
    made = [maker().part(phase, seed=1, index=i, parts=10, tokens=16 * 4096)[0] for i in (0, 9)]
    recall = [
        max(len(text) for text in texts_of(stored) if "<｜User｜>" in text) for stored in made
    ]
    assert recall[0] < recall[1]


def test_the_last_phase_has_long_rows_now_and_then() -> None:
    plan = StorePlan.of(PHASES["D"], tokens=5 * 16384, seed=1, part_tokens=16384)
    assert [plan.phase.is_long_part(i) for i in range(plan.parts)] == [False] * 4 + [True]
    stored, _ = maker().part(plan.phase, seed=1, index=4, parts=5, tokens=16384)
    assert longest_recall(stored) > 2048


def test_the_last_phase_learns_from_assistants_only() -> None:
    for document in np.split(part("D", rows=8), np.flatnonzero(part("D", rows=8) == 0)[1:]):
        text = tokenizer().decode((document & ID_MASK).tolist(), show_control=True)
        if "<｜User｜>" not in text:
            assert not (document & TARGET).any()


def test_without_a_corpus_the_generators_run_alone() -> None:
    alone = PartMaker(Corpus(), tokenizer(), NaturalTokens.none())
    stored, made = alone.part(PHASES["A"], seed=1, index=0, parts=1, tokens=8 * 1024)
    assert len(stored) == 8 * 1024
    assert "prose" not in made
    assert made["stories"] > 0


def test_packing_fills_rows_exactly_and_drops_what_is_too_long() -> None:
    rng = Random(1)
    sizes = [rng.randint(1, 60) for _ in range(2000)]
    source = iter(sizes)
    filled: list[int] = []

    def produce() -> np.ndarray:
        return np.full(next(source), 7, np.uint16)

    def fill(count: int) -> np.ndarray:
        filled.append(count)
        return np.full(count, 9, np.uint16)

    packer = RowPacker(50, produce, fill, rng)
    rows = [packer.row() for _ in range(100)]
    assert {len(row) for row in rows} == {50}
    assert sum(filled) < 0.05 * 50 * 100


def test_a_slice_starts_at_a_paragraph_and_stays_in_its_text() -> None:
    natural = NaturalTokens.of([novel("Emma"), novel("Persuasion")], TextEncoder(tokenizer()))
    for seed in range(50):
        piece = natural.slice(Random(seed), 60, bos=0)
        assert piece[0] == 0
        assert len(piece) <= 60
        text = tokenizer().decode((piece[1:] & ID_MASK).tolist())
        assert text.startswith(("Emma went", "Persuasion went"))
        assert ("Emma" in text) != ("Persuasion" in text)


def test_long_texts_are_sliced_more_often() -> None:
    natural = NaturalTokens.of(
        [novel("Emma", 90), novel("Persuasion", 10)], TextEncoder(tokenizer())
    )
    texts = [tokenizer().decode((natural.slice(Random(i), 20, bos=0)[1:] & ID_MASK).tolist())
             for i in range(300)]  # fmt: skip
    assert 0.8 < sum("Emma" in text for text in texts) / 300 < 0.98


def test_natural_tokens_are_those_of_the_whole_text() -> None:
    text = novel("Emma")
    natural = NaturalTokens.of([text], TextEncoder(tokenizer()))
    assert natural.ids.tolist() == tokenizer().encode("\n\n".join(text.paragraphs) + "\n\n")


def test_held_out_prose_is_kept_from_training() -> None:
    train, held_out = split_prose(corpus().prose)
    assert [(text.title, len(text.paragraphs)) for text in held_out] == [
        ("Northanger Abbey", 4), ("1901-B-1", 300)
    ]  # fmt: skip
    assert sum(len(text.paragraphs) for text in train) == 400 + 36 + 300
    for phase in ("A", "C"):
        stored = part(phase, rows=8 if phase == "A" else 1)
        assert not any("Secret speech" in text for text in texts_of(stored))


def test_a_store_is_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    plan = StorePlan.of(PHASES["A"], tokens=6 * 2048, seed=1, part_tokens=2048)
    for workers in (1, 2):
        written = write_store(plan, maker(), tmp_path / str(workers), workers=workers)
        assert written == 6 * 2048
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == ["DONE", "meta.json", *(f"part-{i:05d}.bin" for i in range(6))]
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_stopped_store_is_completed(tmp_path: Path) -> None:
    plan = StorePlan.of(PHASES["A"], tokens=3 * 1024, seed=1, part_tokens=1024)
    write_store(plan, maker(), tmp_path, workers=1)
    kept = (tmp_path / "part-00001.bin").read_bytes()
    (tmp_path / "part-00001.bin").unlink()
    assert write_store(plan, maker(), tmp_path, workers=1) == 1024
    assert (tmp_path / "part-00001.bin").read_bytes() == kept


def test_a_store_of_other_settings_is_not_mixed_in(tmp_path: Path) -> None:
    plan = StorePlan.of(PHASES["A"], tokens=1024, seed=1)
    write_store(plan, maker(), tmp_path, workers=1)
    with pytest.raises(ConfigError, match="other settings"):
        write_store(StorePlan.of(PHASES["A"], tokens=1024, seed=2), maker(), tmp_path, workers=1)


def test_stored_tokens_are_ids_of_the_vocabulary(tmp_path: Path) -> None:
    plan = StorePlan.of(PHASES["A"], tokens=2048, seed=1)
    write_store(plan, maker(), tmp_path, workers=1)
    stored = np.fromfile(tmp_path / "part-00000.bin", "<u2")
    meta = json.loads((tmp_path / "meta.json").read_text("utf-8"))
    assert len(stored) == meta["part_tokens"] == 2048
    assert not (stored & 0x7000).any()
    assert (meta["row_tokens"], meta["parts"], meta["vocab_size"]) == (1024, 1, 4096)


@pytest.mark.parametrize(("tokens", "part_tokens"), [(0, 5), (5, 0)])
def test_a_store_of_nothing_is_refused(tokens: int, part_tokens: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        StorePlan.of(PHASES["A"], tokens=tokens, seed=1, part_tokens=part_tokens)


@pytest.mark.parametrize(
    ("text", "number"), [("5000", 5000), ("120M", 120_000_000), ("1.5k", 1500), ("1G", 10**9)]
)
def test_numbers_of_tokens_have_suffixes(text: str, number: int) -> None:
    assert token_number(text) == number


def test_other_text_is_no_number_of_tokens() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'many'"):
        token_number("many")


def test_prose_is_tokenised_once(tmp_path: Path) -> None:
    archive = tmp_path / "c"
    write_archive(archive, {"sotu": [{"title": "1900", "text": "A.\n\nB."}]})
    first = natural_tokens(corpus(), TOKENIZER, archive, tmp_path / "cache")
    again = natural_tokens(Corpus(), TOKENIZER, archive, tmp_path / "cache")
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.reach, again.reach)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def items() -> list[Item]:
    return [
        item
        for item in validation_items(corpus(), tokenizer(), items=2)
        if not item.set_name.endswith(("16384", "32768"))
    ]


@pytest.fixture(scope="module")
def validation() -> list[Item]:
    return items()


def test_validation_files_give_back_their_documents(validation: list[Item], tmp_path: Path) -> None:
    assert write_items(tmp_path, validation) == len(validation)
    for item, again in zip(validation, read_items(tmp_path), strict=True):
        assert again.set_name == item.set_name
        assert document_pieces(again.document) == document_pieces(item.document)
        assert again.document.checks == item.document.checks
        assert again.document.nats == item.document.nats


def test_validation_has_the_sets_it_promises(validation: list[Item]) -> None:
    names = {item.set_name for item in validation}
    assert {"stories", "stories-held-out-patterns", "arith-3-digits-thinking", "identity",
            "wordnet-common", "wordnet-held-out", "recall-L-T1-8192", "recall-S-T1-20",
            "prose-austen-1024", "prose-sotu-1024", "tools", "json"} <= names  # fmt: skip


def test_validation_seeds_are_those_of_validation(validation: list[Item]) -> None:
    assert all(item.seed >= VALIDATION_SEED for item in validation if item.document.messages)


def test_validation_words_are_held_out(validation: list[Item]) -> None:
    (first, *_) = [item for item in validation if item.set_name == "wordnet-held-out"]
    word = first.document.checks[1].expected.split(" ")[0]
    assert dictionary.is_held_out(word)


def test_long_recall_fits_the_context_it_is_named_after(validation: list[Item]) -> None:
    encoder = documents.DocumentEncoder(tokenizer())
    for item in validation:
        if item.set_name.startswith("recall-L"):
            limit = int(item.set_name.rsplit("-", 1)[1])
            assert 0.5 * limit < len(encoder.encode(item.document)) <= limit


@pytest.mark.parametrize("line", ["{", "{}", '{"set": "a", "messages": 3}'])
def test_a_malformed_validation_line_is_a_format_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text(line + "\n", "utf-8")
    with pytest.raises(FormatError, match="line 1"):
        list(read_items(path))


def test_the_command_writes_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--phase", "A", "--tokenizer", str(TOKENIZER), "--out", str(tmp_path / "s")]
    monkeypatch.setattr(sys, "argv", ["generate", *arguments, "--tokens", "2K"])
    generate.main()
    assert (tmp_path / "s/DONE").exists()
