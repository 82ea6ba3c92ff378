"""Every variant of every kernel that the cases of `tests/triton` launch, by target."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from recording import Launch, record

CASES = Path(__file__).parents[1] / "triton"
MODULES = tuple(sorted(path.stem for path in CASES.glob("cases_*.py")))
"""`cases()` of each, or `cases(family)` where tile sizes hang on it, yields names and calls."""


@dataclass
class Variant:
    """One binary, and which cases need it."""

    launch: Launch
    cases: list[str] = field(default_factory=list)


def module_cases(module: str, target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases of one module for one target."""
    cases = importlib.import_module(module).cases
    yield from cases(target) if inspect.signature(cases).parameters else cases()


@cache
def module_variants(module: str, target: str) -> dict[str, Variant]:
    """Variants of one module's cases, by the digest of the launch, in order of launch."""
    found: dict[str, Variant] = {}
    for name, call in module_cases(module, target):
        try:
            launches = record(target, call)
        except Exception as error:
            error.add_note(f"in the case {name!r} of {module} for {target}")
            raise
        for launch in launches:
            found.setdefault(launch.digest, Variant(launch)).cases.append(name)
    return found


@cache
def variants(target: str) -> dict[str, Variant]:
    """Variants of every module's cases for one target, by digest."""
    found: dict[str, Variant] = {}
    for module in MODULES:
        for digest, variant in module_variants(module, target).items():
            found.setdefault(digest, Variant(variant.launch)).cases.extend(variant.cases)
    return found
