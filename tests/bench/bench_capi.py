"""What the C interface costs above the Python API: per token, per event, and at the start.

Tokens come from a scripted session, so that nothing but the interface is measured, and from the
shipped model. Both sides run in one process in turns, the C side through the same table of
functions that the library calls, and the best of all turns counts; the Python side decodes each
token too. The start is that of two programs, from their launch to the first event of a reply.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
from harness import Figure

from edgedsv4 import DoneEvent, Engine, SamplingOptions, TextEvent
from edgedsv4.capi import entry, session
from edgedsv4.capi.build import BuildOptions, build
from edgedsv4.capi.header import read_header, table_declaration
from edgedsv4.runtime.stats import SessionTotals, StepStats

FOLDER = Path(__file__).parent
MODEL = "pocket-v4"
SCRIPTED = 20_000
SAMPLED = 200
PYTHON = f"""
from edgedsv4 import Engine, Message, SamplingOptions
greedy = SamplingOptions(temperature=0)
steps = Engine.open({MODEL!r}).new_session().reply([Message("user", "Hi")], greedy)
assert next(steps).text
steps.close()
"""


class ScriptedSession:
    """Says tokens, or as many events."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self.totals = SessionTotals()

    def stopping_when(self, _asked: object) -> nullcontext[None]:
        return nullcontext()

    def generate(self, _options: SamplingOptions, **_: object) -> Iterator[int]:
        yield from self.token_ids

    def reply(self, _messages: object, _options: SamplingOptions, **_: object) -> Iterator[Any]:
        event = TextEvent("word ")
        for _place in self.token_ids:
            yield event
        stats = StepStats(
            prompt_tokens=1, generated_tokens=1, prefill_seconds=1.0, decode_seconds=1.0
        )
        done = SimpleNamespace(finish_reason="stop", stats=stats)
        yield DoneEvent(**vars(done), reply=None, report=None)  # type: ignore[arg-type]


class Interface:
    """The functions of the library inside this process, and callbacks written in C."""

    def __init__(self, folder: Path) -> None:
        header = read_header()
        (folder / "table.h").write_text(table_declaration(header), encoding="utf-8")
        target = folder / "calls.so"
        includes = [f"-I{header.path.parent}", f"-I{folder}"]
        source = str(FOLDER / "capi_calls.c")
        command = ["cc", "-O2", "-shared", "-fPIC", *includes, source, "-o", str(target)]
        subprocess.run(command, check=True)
        self._calls = ctypes.CDLL(str(target))
        for name in ("run_tokens", "run_events"):
            getattr(self._calls, name).restype = ctypes.c_int64
        self._table = ctypes.c_void_p(entry.start(0, header.abi_version))

    def tokens(self, handle: int, most: int) -> int:
        """Generate; how many tokens came."""
        return self._calls.run_tokens(self._table, ctypes.c_void_p(handle), most)

    def events(self, handle: int) -> int:
        """Reply; how many events came."""
        return self._calls.run_events(self._table, ctypes.c_void_p(handle))


def handle_of(own: Any, tokenizer: Any) -> int:
    """A handle for a session of Python."""
    return session.SESSIONS.add(session._OwnSession(own, tokenizer))


def best(works: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Shortest time of each work, in turns, after one turn that is not counted."""
    times = [[harness.once(work) for work in works] for _ in range(turns + 1)][1:]
    return [min(column) for column in zip(*times, strict=True)]


def scripted(interface: Interface, engine: Engine, turns: int) -> tuple[float, float]:
    """(microseconds per token, per event) that C takes above Python."""
    token_ids = engine.tokenizer.encode("the quick fox and the bear " * (SCRIPTED // 7))[:SCRIPTED]
    own = ScriptedSession(token_ids)
    handle = handle_of(own, engine.tokenizer)

    def tokens_of_python() -> None:
        decoder = engine.tokenizer.stream(show_control=True)
        for token_id in own.generate(SamplingOptions()):
            decoder.push(token_id)

    def tokens_of_c() -> None:
        assert interface.tokens(handle, 0) == len(token_ids)

    def events_of_python() -> None:
        for event in own.reply([], SamplingOptions()):
            isinstance(event, DoneEvent)

    def events_of_c() -> None:
        assert interface.events(handle) == len(token_ids)

    found = best([tokens_of_python, tokens_of_c, events_of_python, events_of_c], turns)
    scale = 1e6 / len(token_ids)
    return scale * (found[1] - found[0]), scale * (found[3] - found[2])


def sampled(interface: Interface, engine: Engine, turns: int) -> tuple[float, float]:
    """(tokens per second of Python, of C) with the shipped model."""
    prompt = engine.tokenizer.encode("Once upon a time")
    options = SamplingOptions(temperature=0, max_tokens=SAMPLED)
    with engine.new_session() as own:
        handle = handle_of(own, engine.tokenizer)

        def tokens_of_python() -> None:
            decoder = engine.tokenizer.stream(show_control=True)
            for token_id in own.generate(options):
                decoder.push(token_id)

        def tokens_of_c() -> None:
            assert interface.tokens(handle, SAMPLED) == SAMPLED

        def timed(work: Callable[[], object]) -> float:
            own.sync([])
            own.sync(prompt)
            return harness.once(work)

        # Neighbours on the machine disturb some of many runs only.
        rounds = range(3 * turns + 1)
        times = [(timed(tokens_of_python), timed(tokens_of_c)) for _ in rounds][1:]
        session.SESSIONS.remove(handle)
    return SAMPLED / min(t for t, _ in times), SAMPLED / min(t for _, t in times)


def first_event(folder: Path, turns: int) -> tuple[float, float]:
    """(seconds of the Python program, of the C program) to the first event."""
    prefix = folder / "prefix"
    build(BuildOptions(out=prefix, python=Path(sys.executable), compiler=("cc",)))
    program = folder / "first"
    flags = [f"-I{prefix}/include", f"-L{prefix}/lib", "-ldsv4", f"-Wl,-rpath,{prefix}/lib"]
    source = str(FOLDER / "capi_first_token.c")
    subprocess.run(["cc", "-O2", source, "-o", str(program), *flags], check=True)
    programs = ([sys.executable, "-I", "-c", PYTHON], [str(program), MODEL])

    def work(command: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(command, check=True)

    found = best([work(command) for command in programs], turns)
    return found[0], found[1]


def measure(repeats: int) -> list[Figure]:
    """All figures; those that C adds are never below a nanosecond, which means nothing."""
    with tempfile.TemporaryDirectory() as name, Engine.open(MODEL) as engine:
        folder = Path(name)
        interface = Interface(folder)
        token, event = scripted(interface, engine, repeats)
        of_python, of_c = sampled(interface, engine, repeats)
        start_python, start_c = first_event(folder, repeats)
    return [
        Figure("capi", "C above Python, per token", max(token, 1e-3), "µs", repeats),
        Figure("capi", "C above Python, per event", max(event, 1e-3), "µs", repeats),
        Figure("capi", "pocket-v4 through Python", of_python, "tokens/s", repeats),
        Figure("capi", "pocket-v4 through C", of_c, "tokens/s", repeats),
        Figure("capi", "first event, Python program", 1e3 * start_python, "ms", repeats),
        Figure("capi", "first event, C program", 1e3 * start_c, "ms", repeats),
    ]


if __name__ == "__main__":
    harness.main(measure)
