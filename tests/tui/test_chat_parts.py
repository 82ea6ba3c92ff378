"""The small parts behind the chat screen: feed, thread, pastes, history, status line, advice."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest
from chat_pilot import Ticks

from dsv4_chat.chat_model import ModelStatus, Progress, ReplyOutcome, ReplyPart
from dsv4_chat.code_blocks import code_blocks
from dsv4_chat.conversation import Node
from dsv4_chat.model_thread import ModelThread
from dsv4_chat.pastes import MAX_FILE_BYTES, Pastes, fenced
from dsv4_chat.plain_text import drawable
from dsv4_chat.prompt_history import PromptHistory
from dsv4_chat.reply_feed import ReplyFeed
from dsv4_chat.widgets.status_bar import StatusFacts, status_line
from dsv4_chat.widgets.turn import foot_of, pretty
from dsv4_chat.widgets.welcome import progress_text
from edgedsv4 import NumericError, StorageError


def part(text: str, tokens: int, kind: str = "text") -> ReplyPart:
    return ReplyPart(kind=kind, text=text, tokens=tokens)  # type: ignore[arg-type]  # a kind


def test_feed_joins_neighbours_and_keeps_their_order() -> None:
    feed = ReplyFeed(Ticks())
    for piece in (part("a", 1, "thinking"), part("b", 2, "thinking"), part("c", 3), part("d", 4)):
        feed.add(piece)
    feed.add(ReplyPart(kind="tool_call", name="x", tokens=5))
    feed.add(ReplyPart(kind="tool_call", name="y", tokens=6))
    feed.add(part("e", 7))
    drained = feed.drain()
    assert [(p.kind, p.text or p.name, p.tokens) for p in drained] == [
        ("thinking", "ab", 2),
        ("text", "cd", 4),
        ("tool_call", "x", 5),
        ("tool_call", "y", 6),
        ("text", "e", 7),
    ]
    assert feed.drain() == []


def test_feed_loses_nothing_between_threads() -> None:
    feed = ReplyFeed(Ticks())
    wanted = [f"{number}," for number in range(20_000)]
    writer = threading.Thread(target=lambda: [feed.add(part(text, 1)) for text in wanted])
    writer.start()
    got = ""
    while writer.is_alive():
        got += "".join(p.text for p in feed.drain())
    got += "".join(p.text for p in feed.drain())
    assert got == "".join(wanted)


def test_speed_counts_from_the_first_token() -> None:
    clock = Ticks()
    feed = ReplyFeed(clock)
    clock.now += 5
    feed.add(part("a", 1))
    assert feed.pace.tokens_per_second == 0
    clock.now += 2
    feed.add(part("b", 21))
    assert feed.pace.tokens_per_second == 10


def test_remaining_prefill_follows_its_speed() -> None:
    clock = Ticks()
    feed = ReplyFeed(clock)
    begun = Progress(phase="prefill", done=0, total=100, unit="tokens")
    assert feed.pace.remaining_seconds(begun, clock()) is None
    clock.now += 2
    half = Progress(phase="prefill", done=25, total=100, unit="tokens")
    assert feed.pace.remaining_seconds(half, clock()) == 6


async def test_jobs_run_in_order_in_one_thread_and_raise_where_awaited() -> None:
    thread = ModelThread()
    thread.start()
    order: list[int] = []
    jobs = [thread.submit(lambda n=n: order.append(n)) for n in range(20)]  # type: ignore[misc]

    def fail() -> None:
        raise NumericError("NaN")

    failing = thread.submit(fail)
    await asyncio.gather(*jobs)
    assert order == list(range(20))
    with pytest.raises(NumericError):
        await failing
    assert await thread.submit(threading.get_ident) != threading.get_ident()
    assert thread.stop(seconds=10)


async def test_cancelled_job_is_not_run_and_a_stuck_one_is_not_waited_for() -> None:
    thread = ModelThread()
    thread.start()
    go = threading.Event()
    ran: list[int] = []
    stuck = thread.submit(lambda: go.wait(20))
    waiting = thread.submit(lambda: ran.append(1))
    waiting.cancel()
    assert not thread.stop(seconds=0)
    go.set()
    await stuck
    assert thread.stop(seconds=10)
    assert ran == []


def test_paste_is_found_by_its_whole_mark_only() -> None:
    pastes = Pastes()
    mark = pastes.shorten("x\n" * 20)
    assert mark == "[pasted 21 lines #1]"
    assert pastes.expand(f"a {mark} b") == f"a {'x' * 1}{chr(10)}" + "x\n" * 19 + " b"
    for other in ("[pasted 9 lines #1]", "[pasted 21 lines #2]", "[file x, 1 line #1]"):
        assert pastes.expand(other) == other
    assert pastes.shorten("short") == "short"


def test_paste_that_holds_a_mark_is_sent_as_it_is() -> None:
    pastes = Pastes()
    text = "[pasted 21 lines #1]\n" * 20
    assert pastes.expand(pastes.shorten(text)) == text


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\xff\xfe\x00", "no UTF-8"),
        (b"a\0b", "zero bytes"),
        (b"x" * (MAX_FILE_BYTES + 1), "at most"),
        (None, "no such file"),
    ],
)
def test_only_text_files_are_attached(data: bytes | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(StorageError, match=what):
        Pastes().attach(path)
    with pytest.raises(StorageError, match="not a file"):
        Pastes().attach(tmp_path)


def test_fence_is_longer_than_any_inside() -> None:
    assert fenced("a.md", "````\nx\n````") == "\na.md:\n`````md\n````\nx\n````\n`````\n"
    assert fenced("Makefile", "x\n\n") == "\nMakefile:\n```\nx\n```\n"


def test_history_is_bounded_and_leaves_out_repeats() -> None:
    history = PromptHistory(2, ["old", "older", " "])
    history.add("a")
    history.add("a")
    assert [history.older("draft") for _ in range(3)] == ["a", "older", None]
    assert [history.newer() for _ in range(3)] == ["a", "draft", None]
    none = PromptHistory(0, ["x"])
    none.add("y")
    assert none.older("") is None


def test_code_blocks_are_found_as_markdown_means_them() -> None:
    text = "```py\na\n\nb\n```\n- x\n  ```\n  inner\n  ```\n\n    indented\n\n~~~\nopen"
    assert code_blocks(text)[:2] == ["a\n\nb", "inner"]
    assert code_blocks(text)[-1] == "open"
    assert code_blocks("`inline` only\n\n```\n\n```") == []


def test_control_characters_become_pictures() -> None:
    assert drawable("a\tb\nc") == "a\tb\nc"
    assert drawable("\x1b[0m\x00\x7f\x9b\r\n") == "␛[0m␀␡\ufffd\n"
    assert drawable("a\u202eb\u2028c\ud800") == "ab\nc?"


STATUS = StatusFacts(
    activity="ready",
    tokens_per_second=41.26,
    memory=ModelStatus(
        length=4096, capacity=32768, kv_bytes=9 << 20, tiers=(("gpu", 0.913), ("ram", 0.08))
    ),
    thinking="high",
    model="flash-v4",
)


@pytest.mark.parametrize(
    ("width", "right"),
    [
        (200, "gpu 91% ram 8%  think high  KV 9.0 MiB  ctx 4,096/32,768 12%  flash-v4"),
        (80, "think high  KV 9.0 MiB  ctx 4,096/32,768 12%"),
        (60, "KV 9.0 MiB  ctx 4,096/32,768 12%"),
        (44, "ctx 4,096/32,768 12%"),
        (24, ""),
    ],
)
def test_status_line_leaves_out_the_least_important(width: int, right: str) -> None:
    left, found = status_line(STATUS, width)
    assert left == "ready 41.3 tokens/s"
    assert found == right


def test_status_line_shows_the_prefill() -> None:
    progress = Progress(phase="prefill", done=256, total=1024, unit="tokens")
    facts = StatusFacts(activity="reading", prefill=progress, remaining_seconds=65)
    assert status_line(facts, 80)[0] == "reading ━━────── 256/1,024 1 min 05 s left"


def test_loading_says_what_is_known() -> None:
    assert progress_text(Progress(phase="load libraries", done=0, total=0)) == "load libraries"
    assert progress_text(Progress(phase="open model", done=1, total=4)) == "open model 1 of 4"
    speed = Progress(
        phase="read weights", done=1 << 30, total=1 << 31, bytes_per_second=2.4e9, unit="bytes"
    )
    assert progress_text(speed) == "read weights 1.0 GiB of 2.0 GiB, 2.40 GB/s"


def test_foot_of_an_answer_says_how_it_ended() -> None:
    outcome = ReplyOutcome(generated_tokens=1234, decode_seconds=10.0, drafts="1.80 per step")
    node = Node(id=1, parent=None, role="assistant", content="x", outcome=outcome)
    assert foot_of(node, (1, 1)) == "1,234 tokens · 123.4 tokens/s · 1.80 per step"
    node.outcome = dataclasses.replace(outcome, experts="55% of experts in memory")
    assert foot_of(node, (1, 1)).endswith(" · 1.80 per step · 55% of experts in memory")
    node.state = "stopped"
    assert foot_of(node, (2, 3)).startswith("◀ 2/3 ▶ · ■ stopped · 1,234 tokens")
    assert foot_of(Node(id=1, parent=None, role="user", content="x"), (1, 1)) == ""


def test_arguments_are_indented_when_they_are_json_and_always_bounded() -> None:
    assert pretty('{"a":"ä"}') == '{\n  "a": "ä"\n}'
    assert pretty("{no json") == "{no json"
    assert pretty("[" * 100_000)
    assert pretty("x\n" * 100).splitlines()[-1] == "… 61 more lines"
