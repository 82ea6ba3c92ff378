"""`edgedsv4 tokenize` and `edgedsv4 render`: text to ids and back, conversations to prompts."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.flags import prompt_options
from edgedsv4.cli.run_command import prompt_text
from edgedsv4.cli.sources import check_text, read_text
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4 import Tokenizer
    from edgedsv4.cli.terminal import Terminal


def tokenize(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the ids of a text on one line, or the text of ids."""
    text = prompt_text(args)
    with edgedsv4.open_text(args.model) as model:
        tokenizer = model.tokenizer
        if args.decode:
            ids = parse_ids(text, tokenizer.vocab_size)
        else:
            ids = tokenizer.encode(text, match_added=args.special)
        if args.json:
            terminal.json(
                {"ids": ids, "pieces": pieces(tokenizer, ids), "text": tokenizer.decode(ids)}
            )
        elif args.decode:
            terminal.line(tokenizer.decode(ids))
        else:
            terminal.line(" ".join(str(token_id) for token_id in ids))
    return 0


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of each token by itself; bytes that are no character alone are spelled in hex."""
    return [tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]


def parse_ids(text: str, vocab_size: int) -> list[int]:
    """Reads ids separated by blanks or commas; raises ConfigError naming the first bad one."""
    words = text.replace(",", " ").split()
    for word in words:
        is_number = word.isascii() and word.isdigit() and len(word) <= 10
        if not is_number or int(word) >= vocab_size:
            raise ConfigError(f"expected token ids 0..{vocab_size - 1}, found {word[:40]!r}")
    return [int(word) for word in words]


def render(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the prompt of a conversation: its bytes alone, or with ids as JSON."""
    try:
        document = json.loads(read_text(args.chat, "CHAT"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{args.chat}: expected a JSON conversation: {error}") from None
    with edgedsv4.open_text(args.model) as model:
        prompt = model.render(edgedsv4.chat_from_json(document), prompt_options(args))
        check_text(prompt.text, "CHAT")
        if args.json:
            terminal.json(
                {
                    "variant": model.variant,
                    "text": prompt.text,
                    "ids": model.tokenizer.encode_pieces(prompt.pieces),
                    "opens_in": prompt.opens_in,
                }
            )
        else:
            terminal.out.write(prompt.text)
            terminal.out.flush()
    return 0
