"""The real command in a process of its own, with the random tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edgedsv4

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
    "PYTHONUNBUFFERED": "",
    "XDG_CACHE_HOME": str(ROOT / "absent"),  # figures of this machine would change a plan
}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé"}]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "edgedsv4", *(str(argument) for argument in arguments)]


def edgedsv4_command(
    *arguments: str | Path, stdin: bytes = b"", **environ: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=ENVIRONMENT | environ,
    )


def output(*arguments: str | Path, stdin: bytes = b"") -> str:
    done = edgedsv4_command(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_run_answers_and_repeats_itself_with_a_seed() -> None:
    arguments = ["run", "random-tiny", "-p", "Hi", "-n", "12", "--seed", "7", "--json"]
    first, second = (json.loads(output(*arguments)) for _ in range(2))
    assert first["stats"]["generated_tokens"] in range(1, 13)
    assert [first[k] for k in ("text", "thinking")] == [second[k] for k in ("text", "thinking")]


def test_chat_without_a_model_talks_to_the_shipped_one() -> None:
    out = output("chat", "--threads", "1", "--temp", "0", stdin=b"Who are you?\n/exit\n")
    note, examples, commands, *conversation = out.splitlines()
    assert note == edgedsv4.SHIPPED_MODELS["pocket-v4"].note
    assert examples.startswith("Try: What does river mean?")
    assert "/reset" in commands
    assert conversation[-1] == "I am the edgedsv4 pocket model. I only know simple things."


def test_chat_with_the_random_model_says_so_in_one_line() -> None:
    done = edgedsv4_command("chat", "random-tiny", stdin=b"/exit\n")
    expected = f"{edgedsv4.SHIPPED_MODELS['random-tiny'].note}\n".encode()
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, b"")


def test_inspect_and_plan_count_the_draft_block_of_the_shipped_model() -> None:
    found = json.loads(output("inspect", "pocket-v4", "--json"))
    assert (found["problems"], found["warnings"]) == ([], [])
    assert "draft block" in {role["name"] for role in found["roles"]}
    assert "draft block" in output("plan", "pocket-v4", "--ctx", "1000")


def test_chat_works_over_a_pipe() -> None:
    out = output(
        "chat",
        "random-tiny",
        "-n",
        "5",
        "--think",
        "none",
        "--temp",
        "0",
        stdin=b"Hi\n/stats\n/exit\n",
    )
    assert "prompt" in out
    assert "\x1b" not in out


def test_interrupted_chat_goes_on() -> None:
    with subprocess.Popen(
        command("chat", "random-tiny", "--logit-bias", "1=-inf", "--think", "none"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        process.stdout.readline()  # says that the model is random
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(b"/undo\n/exit\n", timeout=60)
    assert process.returncode == 0, err.decode()
    assert b"the answer so far is kept" in err
    assert rest.endswith(b"(the last exchange is gone)\n")


def test_interrupted_run_ends_with_130() -> None:
    with subprocess.Popen(
        command("run", "random-tiny", "-p", "Hi", "--logit-bias", "1=-inf", "--think", "none"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.endswith(b"\n")
    assert b"Traceback" not in err


def test_inspect_tells_the_shape_and_the_block_types() -> None:
    found = json.loads(output("inspect", "random-tiny", "--json"))
    assert found["kind"] == "gguf"
    assert found["problems"] == []
    assert {"embedding", "head", "attention", "routed experts"} <= {
        role["name"] for role in found["roles"]
    }
    assert "attention" in output("inspect", "random-tiny")


def test_plan_says_what_fits() -> None:
    found = json.loads(output("plan", "random-tiny", "--ctx", "1000", "--ram", "4G", "--json"))
    assert (found["fits"], found["context"], found["limiting_item"]) == (True, 1000, None)
    assert "does not fit" in output("plan", "random-tiny", "--ram", "1M")


def test_plan_beyond_the_model_is_refused() -> None:
    assert edgedsv4_command("plan", "random-tiny", "--ctx", "16000000").returncode == 2


def test_tokenize_goes_both_ways() -> None:
    ids = output("tokenize", "random-tiny", "-p", "Hé 漢\n").strip()
    assert output("tokenize", "random-tiny", "--decode", "-", stdin=ids.encode()) == "Hé 漢\n\n"


def test_control_token_text_stays_text_unless_asked() -> None:
    text = "<｜User｜>"  # noqa: RUF001 -- how the token is spelled
    plain = json.loads(output("tokenize", "random-tiny", "-p", text, "--json"))["ids"]
    special = json.loads(output("tokenize", "random-tiny", "-p", text, "--special", "--json"))[
        "ids"
    ]
    assert (len(plain) > 1, len(special)) == (True, 1)


@pytest.mark.parametrize("ids", ["1 x", "999999", "-1", "1.5"])
def test_bad_ids_are_refused(ids: str) -> None:
    done = edgedsv4_command("tokenize", "random-tiny", f"-p={ids}", "--decode")
    assert (done.returncode, done.stdout) == (2, b"")


def test_render_prints_the_exact_prompt(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(CHAT), encoding="utf-8")
    messages = edgedsv4.messages_from_json(CHAT)
    assert output("render", "random-tiny", path) == edgedsv4.render_prompt(messages).text
    found = json.loads(output("render", "random-tiny", path, "--json"))
    assert found["text"] == edgedsv4.render_prompt(messages).text
    assert len(found["ids"]) > 10


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b'{"messages": []}',
        b'[{"role": "boss"}]',
        b'[{"content": "\\ud800", "role": "user"}]',
        b"[" * 100_000,
        b"\xff",
        b"[NaN]",
    ],
    ids=lambda d: d[:12].decode(errors="replace"),
)
def test_bad_conversation_is_refused(document: bytes) -> None:
    done = edgedsv4_command("render", "random-tiny", "-", stdin=document)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


def test_logits_do_not_depend_on_the_chunk(tmp_path: Path) -> None:
    ids = np.arange(3, 23, dtype="<i4")
    ids.tofile(tmp_path / "ids.i32")
    outs = []
    for chunk in ("20", "7"):
        out = tmp_path / f"{chunk}.npy"
        output(
            "logits",
            "random-tiny",
            "--tokens",
            tmp_path / "ids.i32",
            "--out",
            out,
            "--chunk",
            chunk,
            "--profile",
            "exact",
        )
        outs.append(np.load(out))
    assert outs[0].shape[0] == 20
    assert outs[0].dtype == np.float32
    assert np.allclose(outs[0], outs[1], atol=1e-4)


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff\xff\xff\x7f"], ids=["empty", "odd", "large"])
def test_bad_token_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "ids").write_bytes(data)
    done = edgedsv4_command(
        "logits", "random-tiny", "--tokens", tmp_path / "ids", "--out", tmp_path / "x.npy"
    )
    assert done.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_model_agrees_with_itself(tmp_path: Path) -> None:
    saved = tmp_path / "base.npz"
    text = b"Some text to predict. "
    first = json.loads(
        output(
            "perplexity",
            "random-tiny",
            "-",
            "--ctx",
            "16",
            "--kld-save",
            saved,
            "--json",
            stdin=text,
        )
    )
    second = json.loads(
        output(
            "perplexity",
            "random-tiny",
            "-",
            "--ctx",
            "16",
            "--kld-base",
            saved,
            "--json",
            stdin=text,
        )
    )
    assert first["tokens"] == 22
    assert second["nll"] == first["nll"]
    assert (second["kl_max"], second["top1_agreement"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [[], ["bogus"], ["run"], ["inspect", "a", "b"], ["logits", "random-tiny", "--tokens", "x"]],
    ids=" ".join,
)
def test_wrong_use_is_one_line(arguments: list[str]) -> None:
    done = edgedsv4_command(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really")
    for path in (tmp_path / "absent", tmp_path / "x.gguf", tmp_path):
        for name in ("inspect", "plan"):
            done = edgedsv4_command(name, path)
            assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr


def test_refused_file_is_reported_as_json(tmp_path: Path) -> None:
    done = edgedsv4_command("inspect", tmp_path / "absent", "--json")
    assert json.loads(done.stdout)["problems"] == ["no such file"]


def test_reader_that_goes_away_is_no_error_message() -> None:
    with subprocess.Popen(
        command("render", "random-tiny", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(json.dumps(CHAT).encode())
        process.stdin.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (1, b"")


def test_full_disk_is_told() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("inspect", "random-tiny"),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
    assert (done.returncode, done.stderr) == (1, b"edgedsv4: No space left on device\n")


@pytest.mark.parametrize("arguments", [["inspect"], ["plan"], ["tokenize", "-p", "x"]], ids=str)
def test_header_commands_do_not_import_torch(arguments: list[str]) -> None:
    name, *rest = arguments
    code = (
        "import sys; from edgedsv4.cli import main;"
        f"main({[name, 'random-tiny', *rest]!r}); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False, cwd=ROOT
    )
    assert done.returncode == 0


def test_output_is_utf8_in_any_locale() -> None:
    done = edgedsv4_command(
        "render", "random-tiny", "-", stdin=json.dumps(CHAT).encode(), PYTHONIOENCODING="ascii"
    )
    assert "Hé" in done.stdout.decode("utf-8")
