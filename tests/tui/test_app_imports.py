"""What the app may import, and what importing it must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import FRESH

import dsv4_chat
import edgedsv4

FOLDER = Path(dsv4_chat.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(("dsv4_chat", *path.relative_to(FOLDER).with_suffix("").parts))


def imported_from(path: Path) -> set[str]:
    """Dotted names of edgedsv4 that a module names in imports or as attributes."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "edgedsv4":
            names.add(f"edgedsv4.{node.attr}")
    return {name for name in names if name.startswith("edgedsv4.")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_uses_public_names_only(path: Path) -> None:
    assert imported_from(path) <= {f"edgedsv4.{name}" for name in edgedsv4.__all__}


def test_whole_app_imports_without_torch() -> None:
    names = [name_of(path) for path in MODULES if path.name != "__init__.py"]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'cffi'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [*FRESH, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
