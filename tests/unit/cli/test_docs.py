"""docs/cli.md says what the command line does."""

from __future__ import annotations

from pathlib import Path

from edgedsv4.cli.commands import COMMANDS
from edgedsv4.cli.docs import cli_document

ROOT = Path(__file__).resolve().parents[3]


def test_document_is_up_to_date() -> None:
    stored = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert stored == cli_document(), "run `make docs`"


def test_readme_lists_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [c.name for c in COMMANDS if f"| `edgedsv4 {c.name} " not in readme]
    assert not missing
