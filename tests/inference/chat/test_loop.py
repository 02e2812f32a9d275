"""Chats: the prompt of each turn, what is displayed, and the command."""

import io
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from small_runs import make_chat_run

from zaya_jax import cli
from zaya_jax.checkpoint import load_run
from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import ChatFormat, load_chat_format
from zaya_jax.data.chats.templates.template import ChatTemplate
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.inference.chat.loop import ChatLoop
from zaya_jax.inference.chat.messages import Conversation
from zaya_jax.inference.engine.generate import generate
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.model.zaya import Zaya

TOKENIZER = load_tokenizer("byte-chat")
FORMAT = load_chat_format("zaya", TOKENIZER)
THOUGHT = [
    Piece("<think>", is_mark=True), Piece("\nhm\n"), Piece("</think>", is_mark=True), Piece("\n\n"),
    Piece("yes"),
]  # fmt: skip


class Interrupted:
    """Yields pieces, and then raises KeyboardInterrupt."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def __iter__(self):
        yield from self.pieces
        raise KeyboardInterrupt


def talk(*lines, answers=(), conversation=None, chat_format=FORMAT, **options):
    """Returns the conversation after some lines, the displayed text, and the prompts of all answers."""
    prompts, shown, left = [], [], iter(answers)

    def answer(prompt, number):
        prompts.append(prompt)
        return iter(next(left, [Piece("ok")]))

    settings = {"is_interactive": True, "is_terminal": False} | options
    loop = ChatLoop(chat_format=chat_format, answer=answer, write=shown.append, **settings)
    return loop.run(conversation or Conversation(), iter(lines)), "".join(shown), prompts


def messages(*turns, system=""):
    roles = ["user", "assistant"] * len(turns)
    output = [Message(role, content) for role, content in zip(roles, turns, strict=False)]
    return [*([Message("system", system)] if system else []), *output]


def test_every_prompt_renders_the_whole_conversation():
    start = Conversation(system="be brief")
    actual, shown, prompts = talk("hi", "more", answers=[[Piece("a"), Piece("b")]], conversation=start)
    assert shown == "ab\nok\n"
    assert prompts == [
        FORMAT.answer_prompt(messages("hi", system="be brief")),
        FORMAT.answer_prompt(messages("hi", "ab", "more", system="be brief")),
    ]
    # As in training: the text of a chat begins with the prompt of its last answer.
    whole = FORMAT.encode(actual.messages).tokens_T.tolist()
    assert whole[: len(prompts[1])] == prompts[1]


def test_commands(capsys):
    actual, _, prompts = talk("a", "b", "/undo", "c", "/system new", "", " /d", "/reset", "e", "/quit", "f")
    contents = [FORMAT.answer_prompt(each) for each in (
        messages("a"), messages("a", "ok", "b"), messages("a", "ok", "c"),
        messages("a", "ok", "c", "ok", " /d", system="new"), messages("e", system="new"),
    )]  # fmt: skip
    assert prompts == contents
    assert list(actual.messages) == messages("e", "ok", system="new")
    assert capsys.readouterr().err == "1 turns are left\n0 turns are left\n"
    assert list(talk("a", "/system", conversation=Conversation("x"))[0].messages) == messages("a", "ok")
    assert talk("/undo")[0] == Conversation()


def test_unknown_commands_are_reported_and_not_answered(capsys):
    actual, _, prompts = talk("/udno", "/help", "/quit now")
    assert (actual, prompts) == (Conversation(), [])
    output = capsys.readouterr().err
    assert 'unknown command "/udno"; did you mean "/undo"?' in output
    assert 'unknown command "/quit now"; known are /quit, /reset' in output
    with pytest.raises(ValueError, match='unknown command "/udno"'):
        talk("/udno", is_interactive=False)


def test_an_interruption_keeps_the_partial_answer():
    actual, shown, _ = talk("a", "b", answers=[Interrupted(Piece("half"))])
    assert list(actual.messages) == messages("a", "half", "b", "ok")
    assert shown == "half\nok\n"
    actual, _, _ = talk("a", "b", answers=[Interrupted()])
    assert list(actual.messages) == messages("b", "ok")  # nothing was generated
    actual, _, _ = talk("a", answers=[Interrupted(THOUGHT[0], THOUGHT[1])])
    assert actual.turns[1].content == "<think>\nhm\n</think>"
    with pytest.raises(KeyboardInterrupt):
        talk("a", answers=[Interrupted()], is_interactive=False)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"is_terminal": True}, "\x1b[2m\nhm\n\x1b[22m\n\nyes\n"),
        ({"is_terminal": False}, "<think>\nhm\n</think>\n\nyes\n"),
        ({"is_terminal": True, "shows_thoughts": False}, "yes\n"),
        ({"is_terminal": False, "shows_thoughts": False}, "yes\n"),
    ],
)
def test_thoughts_are_dim_or_marked_or_hidden(options, shown):
    actual, out, prompts = talk("a", "b", answers=[THOUGHT], **options)
    assert out == f"{shown}ok\n"
    content = "<think>\nhm\n</think>\n\nyes"
    assert actual.turns[1].content == content  # the template decides how much of it the next turn sees
    assert prompts[1] == FORMAT.answer_prompt(messages("a", content, "b"))
    assert FORMAT.specials["<think>"] in prompts[1]


def test_terminal_attributes_are_restored():
    _, shown, _ = talk("a", answers=[Interrupted(THOUGHT[0], Piece("h\x1b[31mm\x07"))], is_terminal=True)
    assert shown == "\x1b[2mh[31mm\x1b[22m\n"


def test_a_template_that_begins_the_thought_and_drops_it_later():
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content.split('</think>')[-1] }}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant <think>.' }}{% endif %}"
    )
    chat_format = ChatFormat(ChatTemplate("t", text), TOKENIZER)
    actual, shown, prompts = talk("a", "b", answers=[THOUGHT[1:]], is_terminal=True, chat_format=chat_format)
    assert shown.startswith("\x1b[2m.\nhm\n\x1b[22m\n\nyes\n\x1b[2m.ok\x1b[22m\n")
    assert actual.turns[1].content == "<think>.\nhm\n</think>\n\nyes"
    assert TOKENIZER.decode(prompts[1]) == "user aassistant \n\nyesuser bassistant ."


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "run"
    make_chat_run(folder)
    return folder


def expected_answers(run_folder, *questions, num_new):
    run, output, answers = load_run(run_folder), [], []
    model = Zaya(run.config.model, run.config.execution)
    for question in questions:
        output.append(Message("user", question))
        prompt = FORMAT.answer_prompt(output)
        tokens = generate(model, run.variables, prompt, max_new_tokens=num_new, eos_id=FORMAT.end_id)
        assert not set(tokens) & {261, 262}
        answers.append(TOKENIZER.decode(tokens))
        output.append(Message("assistant", answers[-1]))
    return answers


def test_a_chat_through_pipes(run_folder):
    words = ["chat", str(run_folder), "--temperature", "0", "--max-new-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "zaya_jax.cli", *words],
        input=b"hi\n\nmore\n/quit\nno\n",
        capture_output=True,
        timeout=100,
    )
    answers = expected_answers(run_folder, "hi", "more", num_new=12)
    assert done.stdout.decode() == "".join(f"{answer}\n" for answer in answers)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_conversation_that_is_too_long(run_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 500 + "\n"))
    with pytest.raises(SystemExit) as leaving:
        cli.main(["chat", str(run_folder)])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == (
        "zaya: chat: the conversation has 520 tokens; with an answer it must not exceed "
        "model.max_position_embeddings, 512; /undo or /reset shortens it\n"
    )


# The first terminal that a session opens receives Ctrl-C, so the child must open it itself.
AT_TERMINAL = """\
import os, runpy
os.close(os.open(os.ttyname(0), os.O_RDWR))
runpy.run_module("zaya_jax.cli", run_name="__main__")
"""


class Terminal:
    """Runs `zaya` on a pseudo-terminal."""

    def __init__(self, *words):
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", AT_TERMINAL, *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen, self.presses = "", 0

    def wait_for(self, text, *, seconds=60.0):
        """Reads until a text appears after all earlier ones."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self._master, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def settle(self):
        """Waits until there was no output for a second: a key pressed too early is lost."""
        while select.select([self._master], [], [], 1.0)[0]:
            self.seen += os.read(self._master, 4096).decode(errors="replace")

    def press_until(self, key, text):
        """Presses a key again every few seconds until a text appears: one that comes too early is lost."""
        while True:
            self.type(key)
            try:
                self.wait_for(text, seconds=5.0)
                return
            except AssertionError:
                self.presses += 1
                assert self.presses < 12, f"no {text!r} in {self.seen!r}"

    def type(self, text):
        os.write(self._master, text.encode())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_a_chat_at_a_terminal(run_folder):
    """A greedy answer, Ctrl-C during an answer and while waiting, a mistake, and the end of input."""
    terminal = Terminal("chat", str(run_folder), "--temperature", "0", "--max-new-tokens", "12")
    try:
        terminal.wait_for("Ctrl-C interrupts an answer")
        terminal.wait_for("> ")
        terminal.type("hi\n")
        output = terminal.wait_for("\r\n> ")
        (answer,) = expected_answers(run_folder, "hi", num_new=12)
        shown = "".join(letter for letter in answer if letter.isprintable())
        assert "".join(letter for letter in output if letter.isprintable()).endswith(shown)
        terminal.settle()
        terminal.type("more\n")
        terminal.wait_for("more\r\n")  # Ctrl-C also discards what was typed and not yet read
        terminal.type("\x03")
        # A second Ctrl-C before the next prompt would count as part of the first.
        terminal.wait_for("> ")
        terminal.settle()
        terminal.press_until("\x03", "(/quit or Ctrl-D ends the chat)")
        terminal.settle()
        terminal.type("/udno\n")
        terminal.wait_for('did you mean "/undo"?')
        terminal.settle()  # readline ignores an end of input that arrives before the prompt
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()
