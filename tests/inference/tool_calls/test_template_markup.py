"""The parser of a template is the one that reads what the template writes."""
# ruff: noqa: E501  (templates are one line)

import pytest

from zaya_jax.data.chats.templates.encoding import ChatFormat, load_chat_format
from zaya_jax.data.chats.templates.template import ChatTemplate
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.inference.tool_calls.markup import MARKUPS
from zaya_jax.inference.tool_calls.template_markup import find_markup, require_markup, select_markup

TOKENIZER = load_tokenizer("byte-tools")
_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}CALLS{{ '<|im_end|>' }}"
    "{% endfor %}{{ tools | tojson if tools }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CALL = "{% for c in m.tool_calls or [] %}WRITTEN{% endfor %}"
_TAGS = "<function={{ c.function.name }}>{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function>"
TEMPLATES = {
    "zaya_xml": f"<zyphra_tool_call>{_TAGS}</zyphra_tool_call>",
    "hermes": "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>",
    "qwen3_coder": f"<tool_call>\n{_TAGS}\n</tool_call>",
    None: "[{{ c.function.name }}: {{ c.function.arguments | tojson }}]",
}


def chat_format(name):
    text = _TURNS.replace("CALLS", _CALL.replace("WRITTEN", TEMPLATES[name]))
    return ChatFormat(ChatTemplate("t", text), TOKENIZER)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_selects_the_parser(name):
    found = find_markup(chat_format(name))
    assert found == (MARKUPS[name] if name else None)


def test_the_built_in_template_writes_zaya_xml():
    assert find_markup(load_chat_format("zaya", TOKENIZER)) == MARKUPS["zaya_xml"]
    assert find_markup(load_chat_format("zaya", load_tokenizer("byte-chat"))) is None


def test_a_parser_by_name():
    assert select_markup(chat_format(None), "hermes") == MARKUPS["hermes"]
    with pytest.raises(ValueError, match='unknown tool call parser "x"; it must be one of zaya_xml, hermes'):
        select_markup(chat_format(None), "x")
    with pytest.raises(
        ValueError, match=r"t does not support tool calls, or writes them .*--tool-call-parser"
    ):
        require_markup(chat_format(None), None)
