"""`isthmus chat` as its user meets it: turns, commands, what Ctrl-C leaves, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from io import StringIO, TextIOWrapper
from pathlib import Path

import pytest

from isthmus.chat.session import Session
from isthmus.chat.turns import Conversation, Message, Piece, TooLongError
from isthmus.errors import ConfigError, IsthmusError
from isthmus.llm import LLM, SamplingParams
from tests.command import refusal, run
from tests.server.tiny_model import write_tiny_model

SMALL = ("--dtype", "float32", "--pool-bytes", "1m", "--page-size", "4")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")


class Scripted:
    """Says what it is told to, and remembers what it was asked."""

    greeting = "scripted"

    def __init__(self, *answers: Sequence[str | BaseException]) -> None:
        self._answers = list(answers)
        self.asked: list[list[Message]] = []
        self.closed = 0

    def answer(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        self.asked.append(list(messages))
        try:
            for i, part in enumerate(self._answers.pop(0)):
                if isinstance(part, BaseException):
                    raise part
                yield Piece(part, 10, 4, i + 1)
        finally:
            self.closed += 1

    def said(self, turn: int) -> list[str]:
        return [f"{message['role']}: {message['content']}" for message in self.asked[turn]]


class Person(StringIO):
    """A stream that somebody sits at."""

    def isatty(self) -> bool:
        return True


def piped(speaker: Scripted, lines: str, monkeypatch: pytest.MonkeyPatch, **options: bool) -> Conversation:
    monkeypatch.setattr(sys, "stdin", StringIO(lines))
    conversation = Conversation()
    assert Session(speaker, conversation, **options).run() == 0
    return conversation


def typed(
    speaker: Scripted, lines: Sequence[str | type[BaseException] | BaseException], monkeypatch: pytest.MonkeyPatch
) -> tuple[Conversation, str, str]:
    """What is left of a chat with a person, and what stood on the two streams."""
    out, err, left = Person(), Person(), list(lines)

    def read(prompt: str) -> str:
        out.write(prompt)
        line = left.pop(0) if left else EOFError()
        if isinstance(line, str):
            return line
        raise line

    for name, value in (("stdin", Person()), ("stdout", out), ("stderr", err)):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    conversation = Conversation()
    assert Session(speaker, conversation).run() == 0
    return conversation, out.getvalue(), err.getvalue()


# -- turns --------------------------------------------------------------------------------------------------------


def test_piped_lines_are_turns_and_standard_output_has_answers_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = Scripted(["Hel", "lo"], ["two\nlines\n"])
    piped(speaker, "hi\n\nand now?", monkeypatch)
    captured = capsys.readouterr()
    assert captured.out == "Hello\ntwo\nlines\n"
    assert speaker.said(0) == ["user: hi"]
    assert speaker.said(1) == ["user: hi", "assistant: Hello", "user: and now?"]
    first = captured.err.splitlines()[0]
    assert first.startswith("10 tokens in, 4 of them cached · 2 out · ")
    assert "tok/s" in first
    assert "\x1b" not in captured.err


def test_quiet_leaves_the_answers_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    piped(Scripted(["a"]), "hi\n/undo\n", monkeypatch, quiet=True)
    assert capsys.readouterr() == ("a\n", "")


def test_commands_change_what_the_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Scripted(*[[f"a{i}"] for i in range(5)])
    file = tmp_path / "talk.jsonl"
    lines = ["one", "/undo", "two", "/system Be brief.", "three", f"/save {file}", "/reset", "//four", "/system",
             "/exit", "five"]  # fmt: skip
    conversation = piped(speaker, "\n".join(lines), monkeypatch)
    assert speaker.said(1) == ["user: two"]
    assert speaker.said(2) == ["system: Be brief.", "user: two", "assistant: a1", "user: three"]
    saved = [json.loads(line) for line in file.read_text().splitlines()]
    assert saved == [*speaker.asked[2], {"role": "assistant", "content": "a2"}]
    assert speaker.said(3) == ["system: Be brief.", "user: /four"]
    assert conversation.system is None
    assert len(speaker.asked) == 4, "/exit ends it"


@pytest.mark.parametrize("line", ["/undo", "/nope", "/save", "/save /nowhere/at/all", "\udcff"])
def test_what_goes_wrong_ends_a_script_with_one_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Scripted(["never"])
    with pytest.raises(ConfigError) as caught:
        piped(speaker, f"{line}\nhi\n", monkeypatch)
    assert "\n" not in str(caught.value)
    assert not speaker.asked


def test_bytes_that_are_no_text_end_a_script_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"caf\xe9\n")
    os.close(writing)
    with os.fdopen(reading, "rb") as raw:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(raw, "utf-8"))
        with pytest.raises(ConfigError, match="not UTF-8"):
            Session(Scripted(["never"]), Conversation()).run()


# -- a person -----------------------------------------------------------------------------------------------------


def test_ctrl_c_in_an_answer_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Scripted(["Once upon", KeyboardInterrupt()], ["a time"])
    conversation, out, err = typed(speaker, ["a story", "go on"], monkeypatch)
    assert speaker.said(1) == ["user: a story", "assistant: Once upon", "user: go on"]
    assert conversation.turns[-1] == ("go on", "a time")
    assert out == "> Once upon\n> a time\n> \n"
    assert "stopped\x1b[0m" in err
    assert speaker.closed == 2


def test_an_answer_stopped_before_a_word_is_no_turn_and_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Scripted([KeyboardInterrupt()], ["here"])
    conversation, _, err = typed(speaker, ["", "hello?", ""], monkeypatch)
    assert speaker.said(0) == speaker.said(1) == ["user: hello?"]
    assert conversation.turns == [("hello?", "here")]
    assert "an empty line asks again" in err


def test_ctrl_c_at_the_prompt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        typed(Scripted(), [KeyboardInterrupt], monkeypatch)


def test_bytes_that_are_no_text_are_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, _, err = typed(Scripted(["b"]), [UnicodeDecodeError("utf-8", b"\xe9", 0, 1, ""), "a"], monkeypatch)
    assert "not UTF-8" in err
    assert conversation.turns == [("a", "b")]


def test_ctrl_c_ends_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        piped(Scripted(["Once", KeyboardInterrupt()]), "a story\n", monkeypatch)


def test_a_conversation_that_is_too_long_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Scripted(["a"], [TooLongError("the conversation has 90 tokens")], ["c"])
    conversation, _, err = typed(speaker, ["one", "two", "/undo", ""], monkeypatch)
    assert "isthmus: error: the conversation has 90 tokens: /undo or /reset makes room, then an empty line" in err
    assert conversation.turns == [("two", "c")]


def test_an_answer_that_breaks_is_no_turn_and_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Scripted(["half", IsthmusError("the server is gone")], ["whole"])
    conversation, out, err = typed(speaker, ["one", ""], monkeypatch)
    assert conversation.turns == [("one", "whole")]
    assert out.startswith("> half\n> whole\n")
    assert "isthmus: error: the server is gone" in err


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Scripted(["a\x1b[2Jb\x07\x9b\tc\nd 🙂\u200d é"])
    conversation, out, _ = typed(speaker, ["go"], monkeypatch)
    assert out == "> a␛[2Jb␇\ufffd\tc\nd 🙂\u200d é\n> \n"
    assert "\x1b" in conversation.turns[0][1], "what was said is kept as it was"


def test_half_a_character_of_a_server_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.jsonl"
    piped(Scripted(["\ud83d"]), f"hi\n/save {file}\n", monkeypatch)
    assert json.loads(file.read_text("utf-8").splitlines()[1])["content"] == "?"


# -- a model in this process --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def _own_cache(own_cache: None) -> None:
    pass


def chat(lines: str, monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "stdin", StringIO(lines))
    return run("chat", *args)


def test_the_answers_are_those_of_the_engine_and_later_turns_come_from_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("tell me of the sea\nand then\n", monkeypatch, folder, *SMALL, *GREEDY, "--system", "brief") == 0
    captured = capsys.readouterr()
    llm = LLM(str(folder), dtype="float32", pool_bytes=1 << 20, page_size=4)
    conversation, shown = Conversation("brief"), ""
    for said in ("tell me of the sea", "and then"):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        text = llm.chat(conversation.asking(said), params, use_tqdm=False)[0].outputs[0].text
        conversation.turns.append((said, text))
        shown += text if text.endswith("\n") else text + "\n"
    assert captured.out == shown
    notes = [line for line in captured.err.splitlines() if "tokens in" in line]
    cached = [int(line.split(" of them cached")[0].split()[-1]) for line in notes]
    assert cached[0] == 0 < cached[1]
    assert all(" 8 out" in line and "cut at the limit" in line for line in notes)


BAD = {
    "no model": ([], "no model given"),
    "a conversation beyond the context": (
        ["{folder}", "--max-model-len", "24"],
        "max_model_len is 24, of which one is for the answer: /undo",
    ),
    "several answers": (["{folder}", "--n", "2"], "--n"),
    "a server and a model": (["{folder}", "--url", "http://127.0.0.1:1"], "MODEL is for"),
    "a server and a setting": (["--pool-bytes", "1m", "--url", "http://127.0.0.1:1"], "--pool-bytes is for"),
    "a key without a server": (["{folder}", "--api-key", "x"], "--api-key is for"),
    "nobody there": (["--url", "http://127.0.0.1:1"], "no server answers"),
    "an address that is none": (["--url", "here"], "--url here"),
    "an unknown flag": (["{folder}", "--quite"], "--quite"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gets_one_line_and_exit_code_2(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, named = BAD[case]
    small = SMALL[:2] if args and args[0] == "{folder}" and "--url" not in args else ()
    code = chat("tell me of the sea\n", monkeypatch, *(arg.format(folder=folder) for arg in args), *small)
    assert named in refusal(code, *capsys.readouterr())


def test_a_model_without_a_template_is_refused_and_generate_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_tiny_model(tmp_path / "base", template=None)
    capsys.readouterr()
    line = refusal(chat("hi\n", monkeypatch, base, *SMALL), *capsys.readouterr())
    assert "has no chat template" in line
    assert "isthmus generate" in line


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        claim = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(  # only a terminal that controls its process turns a key into a signal
            [sys.executable, "-c", claim, *command],
            stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | env, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, mark: str, more: int = 0, press: str = "") -> None:
        """Read until that is shown, and so many characters after it, both after what earlier calls saw.

        `press` is typed, and again after a second: readline misses a signal that comes just before it begins to wait.
        """
        end = time.monotonic() + 60
        self.type(press)
        while len(self.seen.partition(mark)[2]) < more or mark not in self.seen:
            if select.select([self._ours], [], [], 1.0 if press else 60.0)[0]:
                self.seen += os.read(self._ours, 4096).decode(errors="replace")
            else:
                assert press, f"no {mark!r} in {self.seen!r}"
                self.type(press)
            assert time.monotonic() < end, f"no {mark!r} in {self.seen!r}"
        self.seen = self.seen.partition(mark)[2]

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(folder: Path, tmp_path: Path, interrupts: None) -> Iterator[Terminal]:
    (tmp_path / "inputrc").write_text("set enable-bracketed-paste off\n")  # the terminal shows what is said alone
    command = [sys.executable, "-m", "isthmus", "chat", str(folder), *SMALL, "--pool-bytes", "8m", "--temperature", "0"]
    env = {"OMP_NUM_THREADS": "1", "TERM": "xterm", "INPUTRC": str(tmp_path / "inputrc")}
    made = Terminal([*command, "--ignore-eos"], env)
    yield made
    made.close()


def test_in_a_terminal_ctrl_c_stops_the_answer_and_then_the_chat(terminal: Terminal, tmp_path: Path) -> None:
    terminal.until("/help lists the commands")
    terminal.until("> ")
    terminal.type("tell me of the sea\n")
    terminal.until("tell me of the sea\r\n", more=1)
    terminal.type("\x03")
    terminal.until("tokens in")
    terminal.until("stopped\x1b[0m")
    terminal.until("> ")
    terminal.type(f"/save {tmp_path}/talk.jsonl\n")
    terminal.until("2 messages")
    terminal.until("> ")
    terminal.until("isthmus: interrupted", press="\x03")
    assert terminal.process.wait(60) == 130
    saved = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert saved[1]["role"] == "assistant"
    assert saved[1]["content"]


@pytest.mark.parametrize("verb", ["chat", "eval"])
def test_help_needs_no_torch(verb: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; from isthmus.cli import main; main(['{verb}', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--pool-bytes" in done.stdout
