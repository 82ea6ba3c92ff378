"""The examples: clean for two compilers, short enough to read, and they do what they say."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from capi.programs import CLANG, GCC, POCKET, ROOT, STRICT, Library, run

EXAMPLES = ROOT / "examples"
GUIDE = (ROOT / "docs" / "c-api.md").read_text(encoding="utf-8")
LIMITS = {"chat.c": 80, "chat.cpp": 60, "two_sessions.c": 80}
ANSWERS = {
    "Who are you?": "I am the edgedsv4 pocket model.",
    "What is the capital of Peru?": "The capital of Peru is Lima.",
}
GXX, CLANGXX = ("g++",), (*CLANG[:-1], "c++")


def build_example(library: Library, name: str) -> Path:
    """An example as its README builds it; the same one is built once."""
    target = library.work / name.replace(".", "_")
    if not target.exists():
        standard, compiler = ("c++17", GXX) if name.endswith("pp") else ("c99", GCC)
        folder = library.prefix / "lib"
        run(
            [
                *(*compiler, f"-std={standard}", *STRICT, f"-I{library.prefix / 'include'}"),
                *(str(EXAMPLES / name), "-o", str(target), f"-L{folder}", "-ldsv4"),
                *(f"-Wl,-rpath,{folder}", "-lpthread"),
            ]
        )
    return target


def start_chat(library: Library) -> subprocess.Popen[bytes]:
    program = build_example(library, "chat.c")
    pipe = subprocess.PIPE
    return subprocess.Popen([program, POCKET, "0"], stdin=pipe, stdout=pipe, bufsize=0, env={})


def read_until(chat: subprocess.Popen[bytes], end: bytes) -> bytes:
    assert chat.stdout is not None
    said = b""
    while end not in said:
        part = chat.stdout.read(4096)
        assert part, f"the chat has ended after {said!r}"
        said += part
    return said


def ask(chat: subprocess.Popen[bytes], question: str) -> None:
    assert chat.stdin is not None
    chat.stdin.write(question.encode() + b"\n")


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_example_is_short(name: str) -> None:
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LIMITS[name]
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("/* ")


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_example_compiles_without_a_warning(compiler: str, name: str, tmp_path: Path) -> None:
    is_cpp = name.endswith("pp")
    commands = {("gcc", True): GXX, ("gcc", False): GCC, ("clang", True): CLANGXX}
    command = commands.get((compiler, is_cpp), CLANG)
    standard = "c++17" if is_cpp else "c99"
    flags = ["-Wshadow", f"-std={standard}", f"-I{ROOT / 'include'}"]
    run([*command, *STRICT, *flags, "-c", str(EXAMPLES / name), "-o", str(tmp_path / "x.o")])


def test_chat_answers_lines_of_stdin(library: Library) -> None:
    program = build_example(library, "chat.c")
    questions = "".join(f"{question}\n" for question in ANSWERS)
    done = subprocess.run(
        [program, POCKET, "0"], input=questions, capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")
    places = [done.stdout.find(answer) for answer in ANSWERS.values()]
    assert places == sorted(places)
    assert places[0] >= 0


def test_chat_stops_a_reply_and_goes_on(library: Library) -> None:
    chat = start_chat(library)
    for _ in range(2):
        ask(chat, "Tell me a story about a fox named Mia.")
        read_until(chat, b"a")
        chat.send_signal(signal.SIGINT)
        read_until(chat, b"(stopped)\n")
    ask(chat, "What is the capital of Peru?")
    said, _ = chat.communicate(timeout=60)
    # Where the stories were cut hangs on the clock, and the words of this answer on where that was.
    assert said.strip()
    assert b"(stopped)" not in said
    assert chat.returncode == 0


def test_chat_says_what_is_wrong_with_a_model(library: Library) -> None:
    program = build_example(library, "chat.c")
    done = subprocess.run(
        [program, "/no/such.gguf"], capture_output=True, text=True, check=False, env={}
    )
    assert done.returncode == 1
    assert done.stderr.startswith("/no/such.gguf: ")


@pytest.mark.parametrize(
    ("temperature", "reason"),
    [("warm", "warm is no temperature"), ("0,5", "0,5 is no temperature"), ("-1", "temperature")],
)
def test_chat_says_what_is_wrong_with_a_temperature(
    library: Library, temperature: str, reason: str
) -> None:
    program = build_example(library, "chat.c")
    done = subprocess.run(
        [program, POCKET, temperature],
        input="Who are you?\n",
        capture_output=True,
        text=True,
        check=False,
        env={},
    )
    assert done.returncode == 1
    assert reason in done.stderr


def test_cpp_chat_shows_a_tool_call_and_uses_its_result(library: Library) -> None:
    said = run([str(build_example(library, "chat.cpp")), POCKET])
    call, answer = said.splitlines()
    assert call == '[get_weather {"city": "Lima"}]'
    assert "Lima" in answer


def test_two_sessions_say_the_same_as_one_alone(library: Library) -> None:
    program = str(build_example(library, "two_sessions.c"))
    first, second = ANSWERS
    alone = [run([program, POCKET, question, question]) for question in (first, second)]
    assert [text.splitlines()[:2] for text in alone] == [text.splitlines()[2:] for text in alone]
    together = run([program, POCKET, first, second])
    assert together.splitlines() == alone[0].splitlines()[:2] + alone[1].splitlines()[:2]


def test_programs_of_the_guide_run(library: Library) -> None:
    (c,) = re.findall(r"```c\n(.*?)```", GUIDE, flags=re.DOTALL)
    (cpp,) = re.findall(r"```cpp\n(.*?)```", GUIDE, flags=re.DOTALL)
    first, second = library.work / "guide.c", library.work / "guide.cc"
    first.write_text(c, encoding="utf-8")
    second.write_text(
        f"#include <dsv4.hpp>\n#include <iostream>\nint main()\n{{\n{cpp}}}\n", encoding="utf-8"
    )
    for compiler, source in ((GCC, first), (GXX, second)):
        standard = "c99" if source is first else "c++17"
        program = source.with_name(f"guide_{source.suffix[1:]}")
        run([*compiler, f"-std={standard}", *STRICT, *library.flags(source, program)])
        assert ANSWERS["Who are you?"] in run([str(program)])
