"""`megatron-hybrid chat` with a server that says what is wanted: one question, and dialogues."""

from __future__ import annotations

import builtins
import io
import json

import pytest

from bench.ports import free_address, free_port
from megatron_hybrid import cli
from megatron_hybrid.terminal import prompt
from megatron_hybrid.terminal.screen import Screen, clean
from tests.terminal.scripted import answer, chunk, scripted_server, stream

FIGURES = "[1,300 prompt tokens, 1,234 of them cached; 57 answer tokens, 20 of them thoughts; first"


class Terminal(io.StringIO):
    """What it shows, as a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def script(monkeypatch):
    monkeypatch.delenv("MEGATRON_HYBRID_API_KEY", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with scripted_server() as script:
        yield script


@pytest.fixture
def ask(script, capsys):
    """One question: the exit code, standard output, standard error."""

    def ask(*arguments):
        try:
            code = cli.main(["chat", "--url", script.url, *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return ask


@pytest.fixture
def type_lines(script, monkeypatch, capsys):
    """A dialogue of these lines, of which a KeyboardInterrupt is Ctrl-C; what it shows."""

    def type_lines(*lines, flags=()):
        left = iter(lines)

        def typed(shown=""):
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        terminal = Terminal()
        monkeypatch.setattr(builtins, "input", typed)
        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("sys.stdout", terminal)
        assert cli.main(["chat", "--url", script.url, *flags]) == 0
        assert next(left, None) is None, "it left before all was typed"
        return terminal.getvalue()

    return type_lines


def messages(script, place=-1):
    return [(m["role"], m["content"]) for m in script.asked[place]["messages"]]


def test_one_question_has_its_answer_alone_on_standard_output(script, ask):
    script.answers = [(200, answer("Hello", ", you.\n"))]
    code, out, err = ask("Who is there?")
    assert (code, out) == (0, "Hello, you.\n")
    assert err.startswith(FIGURES)
    assert messages(script) == [("user", "Who is there?")]


def test_a_question_can_be_piped_in(script, ask, monkeypatch):
    script.answers = [(200, answer("Yes"))]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Is it naïve?\n".encode())))
    assert ask("--no-figures") == (0, "Yes\n", "")
    assert messages(script) == [("user", "Is it naïve?")]


@pytest.mark.parametrize("piped, said", [(b" \n", "No question came"), (b"\xff", "no UTF-8 text")])
def test_what_is_piped_in_and_is_no_question_ends_with_2(ask, monkeypatch, piped, said):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
    code, out, err = ask()
    assert (code, out) == (2, "")
    assert said in err


def test_flags_are_fields_of_the_request(script, ask):
    script.answers = [(200, answer("Yes"))]
    flags = "--temperature 0 --top-k 5 --stop a b --system Short. --model other --max-tokens 7"
    ask("Well?", *flags.split())
    assert script.asked == [
        {
            "model": "other",
            "messages": [
                {"role": "system", "content": "Short."},
                {"role": "user", "content": "Well?"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "top_k": 5,
            "stop": ["a", "b"],
            "max_tokens": 7,
        }
    ]


def test_the_key_of_the_flag_goes_before_that_of_the_environment(script, ask, monkeypatch):
    script.answers = [(200, answer("Yes"))]
    ask("Well?")
    monkeypatch.setenv("MEGATRON_HYBRID_API_KEY", "first second")
    ask("Well?")
    ask("Well?", "--api-key", "mine")
    keys = [headers.get("Authorization") for headers in script.headers]
    assert keys == [None, "Bearer first", "Bearer mine"]


def test_v1_may_stand_at_the_end_of_the_address(script, capsys):
    script.answers = [(200, answer("Yes"))]
    assert cli.main(["chat", "--url", f"{script.url}/v1/", "Well?"]) == 0


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--url", "127.0.0.1:5000"], "--url is '127.0.0.1:5000'; it must be like http://"),
        (["--url", "http://127.0.0.1:port"], "it must be like http://"),
        (["--url", "http://me:secret@host"], "it must be like http://"),
        (["--api-key", "a b"], "can't be sent in a header"),
        (["--api-key", "a\nHost: b"], "can't be sent in a header"),
        (["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1."),
        (["--temprature", "1"], "did you mean --temperature?"),
    ],
)
def test_a_wrong_flag_is_a_sentence_and_2(ask, flags, said):
    code, out, err = ask("Well?", *flags)
    assert (code, out) == (2, "")
    assert said in err and "secret" not in err.replace("me:secret@host", "")


ERROR = {"error": {"message": "The word is \x1b[31mforbidden.", "type": "x", "code": None}}


@pytest.mark.parametrize(
    "status, body, said",
    [
        (400, json.dumps(ERROR).encode(), "The word is \u241b[31mforbidden.\n"),
        (401, json.dumps(ERROR).encode(), "--api-key, or MEGATRON_HYBRID_API_KEY, has the key"),
        (502, b"<html>", "answered with status 502 (Bad Gateway).\n"),
        (500, b'{"error": "of another form"}', "answered with status 500"),
        (302, b"", "answered with status 302 (Found).\n"),
        (200, stream(ERROR, done=False), "The word is \u241b[31mforbidden.\n"),
        (200, b"data: {\n\n", "sent what is no stream of a chat.\n"),
        (200, b'data: {"choices": 1}\n\n', "sent what is no stream of a chat.\n"),
        (200, stream(done=False), "The answer broke off: http://127.0.0.1:"),
    ],
)
def test_what_goes_wrong_is_a_sentence_and_1(script, ask, status, body, said):
    script.answers = [(status, body)]
    code, out, err = ask("Well?")
    assert (code, out) == (1, "")
    assert said in err and "\x1b" not in err
    assert len(script.asked) == 1  # a redirection is not followed: it could lead the key away


def test_what_came_before_an_answer_broke_off_is_shown(script, ask):
    script.answers = [(200, stream(chunk(content="Half of"), done=False))]
    code, out, err = ask("Well?")
    assert (code, out) == (1, "Half of\n")
    assert "closed the connection" in err


def test_a_server_that_is_not_there_is_named(capsys):
    port = free_port()
    assert cli.main(["chat", "--url", f"http://127.0.0.1:{port}", "Well?"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"No server answers at http://127.0.0.1:{port}: Connection refused.")
    assert "`megatron-hybrid serve` starts one" in err


def test_what_lists_no_models_is_a_sentence(script, ask):
    script.models = b'{"data": []}'
    code, _, err = ask("Well?")
    assert code == 1 and err.endswith("/v1/models does not say what is served.\n")


def test_a_proxy_of_the_environment_has_no_part_on_this_machine(script, ask, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{free_address()}")
    script.answers = [(200, answer("Yes"))]
    assert ask("Well?", "--no-figures") == (0, "Yes\n", "")


def test_nothing_that_a_model_says_steers_the_terminal(script, type_lines):
    every = "".join(map(chr, range(0xA0)))
    script.answers = [(200, answer("\x1b", "[2J", every))]
    script.models = json.dumps({"data": [{"id": "\x1b]0;title\x07"}]}).encode()
    shown = type_lines("Well?", flags=["--no-figures"])
    ours = shown.replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert not [c for c in ours if (c < " " and c not in "\n\t") or "\x7f" <= c < "\xa0"]
    assert "\u241b[2J" in ours and "\u241b]0;title\u2407" in ours


def test_what_the_terminal_has_no_letters_for_ends_no_answer(script, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    script.answers = [(200, answer("naïve"))]
    assert cli.main(["chat", "--url", script.url, "Well?"]) == 0
    assert out.buffer.getvalue() == b"na?ve\n"


def test_text_is_left_as_it_is():
    text = "Größe 日本 😀\n\tx = 1\n"
    assert clean(text) == text
    assert clean("safe\rUNSAFE") == "safeUNSAFE"


def test_thoughts_are_dimmed_before_the_answer(script, type_lines):
    parts = [chunk(reasoning_content="Hm"), chunk(reasoning="m."), chunk(content="Yes.")]
    script.answers = [(200, stream(*parts, chunk("stop")))]
    assert "\x1b[2mHmm.\x1b[0m\n\nYes.\n" in type_lines("Well?")
    assert "Hm" not in type_lines("Well?", flags=["--no-thoughts"])


def test_no_color_marks_thoughts_with_words(script, type_lines, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    parts = [chunk(reasoning_content="Hmm."), chunk(content="Yes.")]
    script.answers = [(200, stream(*parts, chunk("stop")))]
    shown = type_lines("Well?")
    assert "[thoughts]\nHmm.\n[answer]\nYes.\n" in shown
    assert "\x1b" not in shown


def test_what_is_read_by_a_program_has_no_thoughts(script, ask):
    script.answers = [(200, stream(chunk(reasoning_content="Hm"), chunk(content="Yes")))]
    assert ask("Well?", "--no-figures") == (0, "Yes\n", "")


def test_a_second_turn_sends_the_first_one_and_its_thoughts_unchanged(script, type_lines):
    script.answers = [
        (200, stream(chunk(reasoning_content="Hm\r\n"), chunk(content="\x1b7315."), chunk("stop")))
    ]
    shown = type_lines("The code?", "And again?")
    assert script.asked[1]["messages"] == [
        {"role": "user", "content": "The code?"},
        {"role": "assistant", "content": "\x1b7315.", "reasoning_content": "Hm\r\n"},
        {"role": "user", "content": "And again?"},
    ]
    assert shown.startswith(f"\x1b[2mscripted at {script.url}; /help lists commands")


def test_figures_stand_below_each_answer(script, type_lines):
    script.answers = [(200, answer("Yes", "."))]
    shown = type_lines("Well?")
    assert f"Yes.\n\x1b[2m{FIGURES} after 0.0" in shown
    assert "tokens/s]" in shown


def test_figures_leave_out_what_the_server_does_not_say(script, ask):
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    script.answers = [(200, stream(chunk(content="Y"), chunk("length"), {"usage": usage}))]
    _, _, err = ask("Well?")
    assert err.startswith("[3 prompt tokens; 1 answer tokens; first after 0.0")
    assert "tokens/s" not in err and "cut off: no more tokens may follow" in err


def test_new_system_and_retry(script, type_lines):
    script.answers = [(200, answer(text)) for text in ("one", "two", "three", "four")]
    type_lines("/retry", "a", "b", "/retry", "/system Short.", "/new", "c", "/system")
    assert messages(script, 1) == [("user", "a"), ("assistant", "one"), ("user", "b")]
    assert messages(script, 2) == messages(script, 1)
    assert messages(script, 3) == [("system", "Short."), ("user", "c")]


def test_a_question_that_failed_is_asked_again_by_retry(script, type_lines):
    refusal = (503, b'{"error": {"message": "The model is loading."}}')
    script.answers = [(200, answer("one")), refusal, (200, answer("two"))]
    shown = type_lines("a", "b", "/retry", "c")
    assert "The model is loading." in shown
    turns = [("user", "a"), ("assistant", "one"), ("user", "b")]
    assert messages(script, 2) == turns
    assert messages(script, 3) == [*turns, ("assistant", "two"), ("user", "c")]


def test_a_chat_is_saved_as_a_request_and_over_no_other_file(script, type_lines, tmp_path):
    script.answers = [(200, answer("one"))]
    file, other = tmp_path / "chat.json", tmp_path / "other"
    other.write_text("mine")
    shown = type_lines(
        *("a", f"/save {file}", "b", f"/save {file}", f"/save {other}", "/save", "/save /no/where"),
        flags=["--temperature", "0"],
    )
    saved = json.loads(file.read_text())
    assert [m["content"] for m in saved["messages"]] == ["a", "one", "b", "one"]
    assert (saved["model"], saved["temperature"]) == ("scripted", 0.0)
    assert other.read_text() == "mine" and f"{other} can't be written: File exists." in shown
    assert "name a file" in shown and "/no/where can't be written: No such file" in shown


def test_commands_and_lines_that_go_on(script, type_lines):
    script.answers = [(200, answer("one"))]
    shown = type_lines("/help", "/nwe", "  ", "//etc is\\", "a folder?", "/quit")
    assert "/save FILE" in shown and "There is no command /nwe" in shown
    assert messages(script) == [("user", "/etc is\na folder?")]
    assert len(script.asked) == 1


def test_ctrl_c_ends_an_answer_and_a_second_one_leaves(script, type_lines, monkeypatch):
    script.answers = [(200, answer("one", "two"))]
    pieces = []

    def interrupted(screen, text):
        pieces.append(text)
        if len(pieces) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "text", interrupted)
    shown = type_lines("a", "b", KeyboardInterrupt(), "c", KeyboardInterrupt(), KeyboardInterrupt())
    assert shown.count("[Ctrl-C again leaves]") == 3
    # What had come of the answer is part of the chat.
    assert messages(script, 1) == [("user", "a"), ("assistant", "one"), ("user", "b")]


def test_an_answer_without_text_that_is_stopped_is_not_part_of_the_chat(script, type_lines):
    script.answers = [(200, stream(chunk(reasoning_content="H"), done=False)), (200, answer("o"))]
    type_lines("a", "b")
    assert messages(script, 1) == [("user", "b")]


def test_prompts_of_a_dialogue_whose_answers_go_to_a_file_do_not(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("/quit\n"))
    assert prompt._input("> ") == "/quit"
    assert capsys.readouterr() == ("", "> ")
