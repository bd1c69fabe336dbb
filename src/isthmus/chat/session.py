"""A chat's loop: lines in, answers out, commands between them.

With a person at both ends there is a prompt, and Ctrl-C stops an answer. Otherwise each line is a turn, standard output
has the answers and nothing else, and whatever goes wrong ends it all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from isthmus.chat.answer import Answer
from isthmus.chat.turns import Conversation, Speaker, TooLongError
from isthmus.errors import ConfigError, IsthmusError, ModelError

_PROMPT = "> "

_HELP = """\
/reset         forget all turns
/undo          forget the last turn
/system TEXT   a system message before everything else; without TEXT, none
/save FILE     write the conversation, one message a line as JSON
/help          these lines
/exit          end; so does Ctrl-D
//TEXT         say something that begins with /
Ctrl-C stops an answer; what was said so far stays. An empty line sends again what got no answer."""


class Session:
    """One conversation with one speaker on standard input and output; notes and counts go to standard error."""

    def __init__(self, speaker: Speaker, conversation: Conversation, *, quiet: bool = False) -> None:
        self._speaker = speaker
        self._conversation = conversation
        self._quiet = quiet
        self._with_person = sys.stdin.isatty() and sys.stdout.isatty()
        self._dims = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._unanswered: str | None = None  # what was said last and got no answer; no turn of the conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/undo": self._undo,
            "/system": self._system,
            "/save": self._save,
            "/help": lambda _: self._tell(_HELP),
        }

    def run(self) -> int:
        """Take lines until they end. IsthmusError, where nobody is there to try again."""
        if self._with_person:
            self._note(f"{self._speaker.greeting}; /help lists the commands")
        with contextlib.closing(self._lines()) as lines:
            for line in lines:
                if line.strip() == "/exit":
                    break
                try:
                    self._take(line)
                except ModelError:
                    raise  # nothing that can be said would help
                except IsthmusError as error:
                    if not self._with_person:
                        raise
                    self._tell(f"isthmus: error: {error}")
        return 0

    def _lines(self) -> Generator[str, None, None]:
        if not self._with_person:
            try:
                yield from (_checked(line.rstrip("\r\n")) for line in sys.stdin)
            except UnicodeDecodeError as error:
                raise ConfigError("standard input is not UTF-8 text") from error
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415 (from now on `input` edits lines and knows those before)
        while True:
            try:
                line = input(_PROMPT)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                raise
            except UnicodeDecodeError:
                self._tell("isthmus: error: what was typed is not UTF-8 text")
                continue
            yield line

    def _take(self, line: str) -> None:
        """One line: a command, something to say, or, if empty, what was said and not answered."""
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = line.strip().partition(" ")
            if name not in self._commands:
                raise ConfigError(f"{name:.40} is no command: /help lists them, and //TEXT says /TEXT")
            self._commands[name](rest.strip())
        elif line.strip():
            self._say(line.removeprefix("/"))
        elif self._unanswered is not None:
            self._say(self._unanswered)

    # -- a turn -----------------------------------------------------------------------------------------------------

    def _say(self, said: str) -> None:
        """One turn; without an answer it is none, and what was said is kept to be sent again."""
        self._unanswered = _checked(said)
        answer = Answer()
        try:
            self._listen(said, answer)
        except TooLongError as error:
            again = ", then an empty line sends it" if self._with_person else ""
            raise TooLongError(f"{error}: /undo or /reset makes room{again}") from error
        finally:
            if answer.text and not answer.text.endswith("\n"):
                print(flush=True)
        if not answer.stopped and not answer.text:
            print(flush=True)  # an answer of no words is one too
        if answer.text or not answer.stopped:
            self._conversation.turns.append((said, answer.text))
            self._unanswered = None
        self._note(answer.summary())

    def _listen(self, said: str, answer: Answer) -> None:
        try:
            with contextlib.closing(self._speaker.answer(self._conversation.asking(said))) as pieces:
                for piece in pieces:
                    answer.add(piece)
                    print(_harmless(piece.text) if self._with_person else piece.text, end="", flush=True)
        except KeyboardInterrupt:
            if not self._with_person:
                raise
            answer.stopped = True

    # -- commands ---------------------------------------------------------------------------------------------------

    def _reset(self, rest: str) -> None:
        self._conversation.turns.clear()
        self._note("a new conversation")

    def _undo(self, rest: str) -> None:
        if not self._conversation.turns:
            raise ConfigError("/undo: there is no turn to forget")
        said, _ = self._conversation.turns.pop()
        self._note(f"forgot {said!r:.60} and its answer")

    def _system(self, rest: str) -> None:
        self._conversation.system = rest or None
        self._note("the system message is set" if rest else "no system message")

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save FILE: name the file")
        self._note(f"{self._conversation.save(Path(rest).expanduser())} messages in {rest}")

    # -- standard error -----------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        if not self._quiet:
            self._tell(text)

    def _tell(self, text: str) -> None:
        print(f"\x1b[2m{text}\x1b[0m" if self._dims else text, file=sys.stderr, flush=True)


def _checked(text: str) -> str:
    """ConfigError for what a terminal or a pipe gave and is not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("standard input is not UTF-8 text") from error
    return text


def _harmless(text: str) -> str:
    """Text that cannot steer a terminal: control characters but newlines and tabs become pictures of them."""
    return text.translate(_PICTURES)


_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(0x7F, 0xA0), 0xFFFD
)
