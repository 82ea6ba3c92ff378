"""The code blocks of an answer, as Markdown means them."""

from __future__ import annotations

from markdown_it import MarkdownIt


def code_blocks(text: str) -> list[str]:
    """The text of each fenced or indented block, in order; an open fence at the end counts."""
    tokens = MarkdownIt("commonmark").parse(text)
    return [
        token.content.removesuffix("\n")
        for token in tokens
        if token.type in ("fence", "code_block") and token.content.strip()
    ]
