"""Tools and tool calls of records: both forms of arguments, null fields, and a message for each mistake."""
# ruff: noqa: E501  (each mistake is a line)

import json

import pytest

from zaya_jax.data.chats.chat_corpus import build_chat_corpus
from zaya_jax.data.chats.labeled_records import read_labeled_answers
from zaya_jax.data.chats.preference_corpus import build_preference_corpus
from zaya_jax.data.chats.preference_records import read_preferences
from zaya_jax.data.chats.records import Message, parse_messages, read_chats
from zaya_jax.data.chats.tool_records import ToolCall, parse_tools
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer

FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
U = {"role": "user", "content": "q"}


def called(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def parsed(*messages):
    return parse_messages(list(messages), "here", "messages")


ARGUMENTS = {
    "object": ({"a": 1, "b": [None, {"c": 2}]}, {"a": 1, "b": [None, {"c": 2}]}),
    "text": ('{"a": 1, "b": null}', {"a": 1, "b": None}),
    "nulls of datasets": ({"a": 1, "b": None, "c": {"d": None}}, {"a": 1, "c": {}}),
    "nothing": (None, {}),
    "empty text": ("", {}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    value, expected = ARGUMENTS[name]
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": value}}
    _, message = parsed(U, called(call))
    assert message == Message("assistant", None, tool_calls=(ToolCall("f", expected, "x"),))
    bare = {"name": "f", "arguments": value, "id": "x"}
    assert parsed(U, called(bare))[1] == message
    function = {"name": "f", "arguments": expected}
    assert message.to_json()["tool_calls"] == [{"id": "x", "type": "function", "function": function}]


def test_tools_of_all_forms():
    expected = (TOOL,)
    assert parse_tools([TOOL], "here") == expected
    assert parse_tools(json.dumps([TOOL]), "here") == expected
    assert parse_tools([{**TOOL, "strict": None, "function": {**FUNCTION, "x": None}}], "here") == expected
    assert parse_tools([FUNCTION], "here") == (FUNCTION,)
    # Of text nothing is removed: `datasets` did not write its fields.
    default = {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}
    assert parse_tools(json.dumps([default]), "here") == (default,)
    assert parse_tools(None, "here") == parse_tools([], "here") == ()


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
MISTAKES = {
    "tools object": ({"messages": [U], "tools": {}}, "has a dict as tools; it must be a list"),
    "tools text": ({"messages": [U], "tools": "["}, "tools is not JSON"),
    "tool": ({"messages": [U], "tools": [{"type": "function"}]}, 'tool 1 is {"type": "function"}; it must'),
    "tool type": ({"messages": [U], "tools": [TOOL | {"type": "search"}]}, 'it must be {"type": "function"'),
    "tool name": ({"messages": [U], "tools": [{"name": "a>b"}]}, "tool 1 has the name 'a>b'; a name has 1"),
    "parameters": ({"messages": [U], "tools": [{"name": "f", "parameters": [1]}]}, "has parameters that are no"),
    "calls": ({"messages": [U, called() | {"tool_calls": {}}]}, "message 2, has a dict as tool_calls; it must"),
    "call": ({"messages": [U, called(3)]}, "message 2, tool call 1 is 3; it must be"),
    "call name": ({"messages": [U, called({"function": {"name": "a b"}})]}, "has the name 'a b'"),
    "call field": ({"messages": [U, called(CALL | {"x": 1})]}, "tool call 1 is "),
    "call id": ({"messages": [U, called(CALL | {"id": 3})]}, "has an id that is a int"),
    "arguments list": ({"messages": [U, called({"name": "f", "arguments": [1]})]}, "has arguments that are a list"),
    "arguments text": ({"messages": [U, called({"name": "f", "arguments": "{'a'"})]}, "arguments, is not JSON"),
    "arguments twice": (
        {"messages": [U, called({"name": "f", "arguments": '{"a": 1, "a": 2}'})]}, 'arguments, has "a" twice',
    ),
    "surrogate": ({"messages": [U, called({"name": "f", "arguments": {"a": "\ud800"}})]}, "half a surrogate pair"),
    "calls of a user": ({"messages": [U | {"tool_calls": [CALL]}]}, "is from the user and has tool_calls; only"),
    "id of a user": ({"messages": [U | {"tool_call_id": "x"}]}, "has tool_call_id; only messages of the tool have"),
    "null without calls": ({"messages": [U, called()]}, "message 2, has content that is null; it must be text"),
    "no content": ({"messages": [U, {"role": "tool", "tool_call_id": "x"}]}, "has role, tool_call_id; a message has"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported_with_their_location(tmp_path, name):
    record, sentence = MISTAKES[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"a\.jsonl:1") as raised:
        list(read_chats(tmp_path / "a.jsonl"))
    assert sentence in str(raised.value)


def records(number, *, of_pairs=False):
    for i in range(number):
        call = {
            "id": None,
            "type": "function",
            "function": {"name": "f", "arguments": {"a": f"x{i}", "z": None}},
        }
        chat = [U | {"content": f"q{i}"}, called(call), {"role": "tool", "content": "r"}]
        answers = [[{"role": "assistant", "content": each}] for each in ("good", "bad")]
        sides = {"prompt": chat, "chosen": answers[0], "rejected": answers[1]}
        yield {"tools": [TOOL], **(sides if of_pairs else {"messages": chat + answers[0]})}


def test_a_corpus_learns_calls_and_answers(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records(6)))
    tokenizer = load_tokenizer("byte-tools")
    report = build_chat_corpus(
        tmp_path / "corpus", source=tmp_path / "a.jsonl", tokenizer=tokenizer, sequence_length=1024
    )
    call = "\n<function=f>\n<parameter=a>\nx0\n</parameter>\n</function>\n"
    # Each call has two tags, each of the two turns an end, and the answer "good" has 4 bytes.
    assert sum(report.num_learned.values()) == 6 * (2 + len(call) + 2 + 4)
    chats = list(read_chats(tmp_path / "a.jsonl"))
    assert chats[0].tools == (TOOL,)
    assert len({chat.hash for chat in chats}) == 6
    assert chats[0].hash != type(chats[0])(chats[0].messages, "").hash


def test_pairs_with_tools(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records(6, of_pairs=True)))
    pairs = list(read_preferences(tmp_path / "a.jsonl"))
    assert pairs[0].tools == (TOOL,)
    assert [each.tools for each in read_labeled_answers(tmp_path / "a.jsonl")] == [(TOOL,)] * 12
    assert pairs[0].prompt[1].tool_calls == (ToolCall("f", {"a": "x0"}),)
    report = build_preference_corpus(
        tmp_path / "corpus",
        source=tmp_path / "a.jsonl",
        tokenizer=load_tokenizer("byte-tools"),
        sequence_length=2048,
    )
    # Only the answers are learned, and not the call in the prompt.
    assert sum(report.num_learned.values()) == 6 * (len("good") + len("bad") + 2)
