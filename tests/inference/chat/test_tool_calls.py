"""Tool calls at the terminal: a readable line for each, and results by /tool."""
# ruff: noqa: E501  (texts of tests are one line)

import json

import pytest
from small_runs import make_chat_run
from test_loop import talk

from zaya_jax import cli
from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.tool_records import ToolCall
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.inference.chat.messages import Conversation
from zaya_jax.inference.chat.tool_calls import describe_call
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.tool_calls.markup import MARKUPS
from zaya_jax.inference.tool_calls.message_parser import ToolParsing

FORMAT = load_chat_format("zaya", load_tokenizer("byte-tools"))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = ({"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},)
PARSING = ToolParsing(MARKUPS["zaya_xml"], TOOLS, FORMAT.specials)
OPEN, CLOSE = (Piece(tag, is_mark=True) for tag in ("<zyphra_tool_call>", "</zyphra_tool_call>"))
BODY = "\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
CALL = [OPEN, *map(Piece, BODY), CLOSE]
THOUGHT = [Piece("<think>", is_mark=True), Piece("hm"), Piece("</think>", is_mark=True), Piece("\n\n")]
SHOWN = 'call: get_weather(city="Paris", days=3)\n'


def chat(*lines, answers, **options):
    start = Conversation(tools=TOOLS)
    return talk(*lines, answers=answers, conversation=start, chat_format=FORMAT, parsing=PARSING, **options)


def calls_of(message):
    return [(call.name, call.arguments) for call in message.tool_calls]


def test_a_call_and_its_result(capsys):
    found, shown, prompts = chat(
        "How is it?", "/tool 22", answers=[[Piece("Let me see.\n"), *CALL], [Piece("Warm.")]]
    )
    assert shown == f"Let me see.\n{SHOWN}Warm.\n"
    question, call, result, answer = found.turns
    assert (call.content, calls_of(call)) == ("Let me see.", [("get_weather", {"city": "Paris", "days": 3})])
    assert result == Message("tool", "22", name="get_weather", tool_call_id=call.tool_calls[0].id)
    assert answer == Message("assistant", "Warm.")
    assert prompts == [
        FORMAT.answer_prompt([question], tools=TOOLS),
        FORMAT.answer_prompt([question, call, result], tools=TOOLS),
    ]
    assert "/tool TEXT sends the result" in capsys.readouterr().err


def test_every_call_needs_its_result(capsys):
    found, shown, prompts = chat(
        "a", "/tool one", "/tool two", "/undo", answers=[[*CALL, Piece("\n"), *CALL]]
    )
    assert shown == f"{SHOWN}{SHOWN}ok\n"
    assert len(prompts) == 2
    assert found.turns == ()
    errors = capsys.readouterr().err
    assert 'get_weather(city="Paris", days=3) waits for its result' in errors
    assert "0 turns are left" in errors


def test_a_result_without_a_call(capsys):
    found, _, _ = chat("a", "/tool x", answers=[[Piece("b")]])
    assert len(found.turns) == 2
    assert "no tool call waits for a result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pieces", "text", "content"),
    [
        ([*THOUGHT, *CALL], f"<think>hm</think>\n\n{SHOWN}", "<think>hm</think>"),
        ([*THOUGHT[:2], *CALL], f"<think>hm</think>\n{SHOWN}", "<think>hm</think>"),
        ([*THOUGHT[:2], *CALL, *THOUGHT[2:], Piece("no")], f"<think>hm{BODY}</think>\n\nno\n", f"<think>hm{BODY}</think>\n\nno"),
    ],
    ids=["after a thought", "in a thought without an end", "draft"],
)  # fmt: skip
def test_calls_and_thoughts(pieces, text, content):
    found, shown, _ = chat("a", answers=[pieces])
    assert (shown.replace("\n\n", "\n"), found.turns[1].content.strip()) == (
        text.replace("\n\n", "\n"),
        content,
    )


def test_a_call_as_code():
    assert describe_call(ToolCall("f", {"a": "é", "b": [None, True]})) == 'f(a="é", b=[null, true])'


def test_the_command_refuses_tools_that_the_template_does_not_support(tmp_path, capsys):
    make_chat_run(tmp_path / "run")
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    with pytest.raises(SystemExit):
        cli.main(["chat", str(tmp_path / "run"), "--tools", str(tmp_path / "tools.json")])
    assert 'the tokenizer "byte-chat" has no special token <zyphra_tool_call>' in capsys.readouterr().err
