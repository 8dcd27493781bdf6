"""The dialogue: questions and commands from the keyboard."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress

from megatron_hybrid.terminal.client import ServerError
from megatron_hybrid.terminal.conversation import Conversation

PROMPT, MORE = "> ", ". "

HELP = """\
/new            begin a new chat, with the same system message
/system TEXT    the system message from now on; without TEXT: none
/retry          ask the last question again
/save FILE      write the chat as JSON, which POST /v1/chat/completions takes
/help           this
/quit           leave, as Ctrl-D does
A line that ends with \\ goes on in the next one; a question that begins with / is written as //.
Ctrl-C ends an answer, and a second one leaves."""


class Dialogue:
    """Asks what is typed, until the user leaves."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._note = conversation.screen.note
        self._saved: set[str] = set()  # files that this chat wrote
        self._commands: dict[str, Callable[[str], None]] = {
            "/new": self._new,
            "/system": self._system,
            "/retry": self._retry,
            "/save": self._save,
            "/help": lambda _: self._note(HELP),
        }

    def run(self) -> None:
        """Until /quit, the end of the input, or Ctrl-C twice."""
        with suppress(ImportError):
            import readline  # input() then edits its line, and has a history

            # What is pasted stays one question, which Python switches off.
            readline.parse_and_bind("set enable-bracketed-paste on")
        interrupted = False
        while True:
            try:
                line = _read_line()
                interrupted = False
                if line.split() in (["/quit"], ["/exit"]):
                    return
                self._obey(line)
            except KeyboardInterrupt:
                if interrupted:
                    self._note("")
                    return
                interrupted = True
                self._note("\n[Ctrl-C again leaves]")
            except EOFError:
                self._note("")
                return
            except ServerError as error:
                self._note(str(error))

    def _obey(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if not line.strip():
            return
        if name in self._commands:
            self._commands[name](rest.strip())
        elif line.startswith("/") and not line.startswith("//"):
            self._note(f"There is no command {name}; /help lists them.")
        else:
            self._conversation.ask(line.removeprefix("/") if line.startswith("//") else line)

    def _new(self, _: str) -> None:
        self._conversation.forget_all()
        self._note("A new chat.")

    def _system(self, text: str) -> None:
        self._conversation.system = text or None
        self._note("The system message is set." if text else "There is no system message.")

    def _retry(self, _: str) -> None:
        question = self._conversation.question
        if question is None:
            self._note("Nothing was asked yet.")
            return
        self._conversation.forget_last()
        self._conversation.ask(question)

    def _save(self, path: str) -> None:
        if not path:
            self._note("/save FILE: name a file.")
            return
        body = {"model": self._conversation.model, "messages": self._conversation.messages}
        try:
            # Nobody's file is lost by a name that is there already.
            with open(path, "w" if path in self._saved else "x", encoding="utf-8") as file:
                json.dump(body | self._conversation.sampling, file, indent=2)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._note(f"{path} can't be written: {reason}.")
            return
        self._saved.add(path)
        self._note(f"Saved to {path}.")


def _read_line() -> str:
    """What was typed, with lines that go on put together."""
    lines = [_input(PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_input(MORE))
    return "\n".join(lines)


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # answers alone go to standard output
    return input()
