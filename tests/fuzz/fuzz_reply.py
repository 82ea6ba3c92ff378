"""Coverage-guided fuzzing of the reply parser; needs atheris.

    python tests/fuzz/fuzz_reply.py -max_total_time=120 SCRATCH

New inputs go to the directory SCRATCH. Every finding becomes a named unit test.
"""

# ruff: noqa: RUF001 (the full-width bar is part of the token texts)

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("content", "thinking", "tool_calls")
MARKUP = (
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="k" string="true">',
    '<｜DSML｜parameter name="k" string="false">',
    "</｜DSML｜parameter>",
    "</think>",
    "\n",
    '">',
)


def decoded(content: bytes) -> str:
    """Text of fuzzer bytes: 0xF0 and up stand for markup, which mutation hardly ever spells."""
    parts = []
    for byte in content:
        at = byte - 0xF0
        parts.append(MARKUP[at] if 0 <= at < len(MARKUP) else chr(byte))
    return "".join(parts)


def check_one(content: bytes) -> int:
    """Parse `content` whole and in pieces; anything unlike, or any exception, escapes.

    Returns:
        the number of tool calls.
    """
    # Imported here: `main` instruments the package first.
    from edgedsv4.text.reply import ReplyParser

    head, text = content[:2].ljust(2, b"\0"), decoded(content[2:])
    variant = "v4.1" if head[0] & 4 else "v4"
    if variant == "v4.1":
        text = text.replace("DSML｜tool_calls", "DSML｜ calls")
        text = text.replace("DSML｜invoke", "DSML｜ invoke").replace("DSML｜param", "DSML｜ param")
    step = 1 + head[1] % 7
    replies = []
    for size in (len(text) or 1, step):
        parser = ReplyParser(
            starts_in=SECTIONS[head[0] % 3],
            variant=variant,
            is_continuation=bool(head[0] & 8),
        )
        for start in range(0, len(text), size):
            parser.push(text[start : start + size])
        parser.finish("length" if head[0] & 16 else "stop")
        replies.append(parser.reply)
    if replies[0] != replies[1]:
        raise AssertionError(f"depends on the cut: {replies}")
    for call in replies[0].tool_calls:
        if not isinstance(json.loads(call.arguments), dict):
            raise AssertionError(f"arguments are no object: {call}")
    return len(replies[0].tool_calls)


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's own options say stop."""
    import atheris

    with atheris.instrument_imports(include=["edgedsv4.text"]):
        import edgedsv4.text.reply
    assert edgedsv4.text.reply is not None
    options = ["-max_len=400", "-timeout=10", "-rss_limit_mb=1024", *arguments[1:]]
    atheris.Setup([arguments[0], *options], lambda content: check_one(content) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv)
