"""Templates from elsewhere: how they are found, their limits, and the same output as in transformers."""

import json
import random
import time

import pytest
from chat_templates import CHATML, SPECIALS, TEMPLATES
from tokenizers import Tokenizer, models

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates import worker_pool
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.templates.template import ZAYA, ChatInput, ChatTemplate, load_template
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import UserError

CHAT = [
    Message("user", " Hi\tthere "),
    Message("assistant", "<think>\nhm\n</think>\n\nYes & no"),
    Message("user", "A?"),
]


@pytest.fixture
def folder(tmp_path):
    """The folder of a tokenizer with the special tokens of common templates, and without a template."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<eos>"})
    return tmp_path


def write(folder, name, value):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def tokenizer_in(folder):
    return load_tokenizer(str(folder / "tokenizer.json"))


# Finding a template


LISTED = [{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "rag"}]


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        ({}, None, None),
        ({"tokenizer_config.json": {"chat_template": "one"}}, None, "one"),
        ({"tokenizer_config.json": {"chat_template": None}}, None, None),
        ({"tokenizer_config.json": {"chat_template": [*LISTED, {"name": "default", "template": "d"}]}}, None, "d"),  # noqa: E501
        ({"tokenizer_config.json": {"chat_template": {"default": "d", "x": "y"}}}, None, "d"),
        ({"tokenizer_config.json": {"chat_template": LISTED}}, "rag", "rag"),
        ({"chat_template.json": {"chat_template": "legacy"}}, None, "legacy"),
        ({"chat_template.json": {"chat_template": "a"}, "tokenizer_config.json": {"chat_template": "b"}}, None, "a"),  # noqa: E501
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "b"}}, None, "file"),
        ({"chat_template.jinja": "file", "chat_template.json": {"chat_template": "b"}}, None, "file"),
        ({"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}, None, "d"),
        ({"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}, "tool_use", "t"),
        ({"tokenizer_config.json": {"chat_template": "one"}}, "zaya", None),
    ],
)  # fmt: skip
def test_search_order_of_templates(files, name, expected, folder):
    for file, value in files.items():
        write(folder, file, value)
    actual = load_template(name, tokenizer_in(folder))
    assert (actual.name == ZAYA) if expected is None else (actual.text == expected)


@pytest.mark.parametrize(
    ("files", "name", "sentence"),
    [
        ({"tokenizer_config.json": {"chat_template": LISTED}}, None, r"chat templates tool_use, rag and no default; choose one \(--template tool_use\)"),  # noqa: E501
        ({"additional_chat_templates/rag.jinja": "t"}, None, "chat templates rag and no default"),
        ({"tokenizer_config.json": {"chat_template": LISTED}}, "ragg", 'unknown chat template "ragg".* tool_use, rag'),  # noqa: E501
        ({"tokenizer_config.json": {"chat_template": 5}}, None, "chat_template must be text, or a list"),
        ({"tokenizer_config.json": {"chat_template": [1]}}, None, "chat_template must be text, or a list"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "a"}]}}, None, "chat_template must be text, or a list"),  # noqa: E501
        ({"chat_template.json": {"chat_template": {"a": []}}}, None, "chat_template.json: chat_template must be text"),  # noqa: E501
        ({"chat_template.json": "[]"}, None, "must be a JSON object"),
        ({"chat_template.jinja": "{% if %}"}, None, r"chat_template.jinja cannot render the chat: .*syntax error in line 1"),  # noqa: E501
        ({"chat_template.jinja": "\n\n{{ messages"}, None, "syntax error in line 3"),
        ({"chat_template.jinja": "{% for m in messages %}"}, None, "syntax error in line 1"),
        ({"chat_template.jinja": "{{ messages | nofilter }}"}, None, "No filter named 'nofilter'"),
        ({"chat_template.jinja": "{% include 'x' %}"}, None, "cannot render the chat"),
    ],
)  # fmt: skip
def test_an_unusable_template_is_rejected_with_the_reason(files, name, sentence, folder):
    for file, value in files.items():
        write(folder, file, value)
    with pytest.raises(UserError, match=sentence):
        load_chat_format(name, tokenizer_in(folder))


@pytest.mark.parametrize(
    ("text", "is_marked"),
    [
        ("{% generation %}a{% endgeneration %}", True),
        ("{%- generation -%}a{%- endgeneration -%}", True),
        ("{%+ generation %}a{% endgeneration %}", True),
        ("{% if a %}{% generation %}a{% endgeneration %}{% endif %}", True),
        ("{# {% generation %}a{% endgeneration %} #}b", False),
        ("{#- see {% generation %} -#}", False),
        ("{% raw %}{% generation %}a{% endgeneration %}{% endraw %}", False),
        ("{{ '{% generation %}' }}", False),
        ("a", False),
    ],
)  # fmt: skip
def test_generation_blocks_are_parsed_by_jinja(text, is_marked):
    assert ChatTemplate("t", text).marks_generation is is_marked


# Turn delimiters


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_the_hub_have_turn_delimiters(name, folder):
    write(folder, "chat_template.jinja", TEMPLATES[name])
    assert load_chat_format(None, tokenizer_in(folder)).turn_ends.ids


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("im_end", "im_finish"),
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}{{ eos_token }}",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n\n{% endfor %}###",
        "{% for m in messages %}{{ m.content }}</turn><eos>{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ '###' if m.role == 'user' else '<eos>' }}{% endfor %}",
        "{{ messages[0].content }}<eos>",
    ],
)
def test_a_turn_delimiter_that_is_not_one_special_token_is_rejected(template, folder):
    write(folder, "chat_template.jinja", template)
    with pytest.raises(UserError, match=r"so that a message could forge the end|omits messages of the"):
        load_chat_format(None, tokenizer_in(folder))


# Limits


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes longer than 0.5 seconds"),  # noqa: E501
        ("{{ 10 ** (10 ** 9) }}", "takes longer than 0.5 seconds|takes more than 1 GiB"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply|takes longer"),
        ("{{ 'a'.center(3*10**9) }}", "takes more than 1 GiB of memory"),
        ("{{ 'a' * 10 ** 10 }}", "takes more than 1 GiB of memory"),
        ("{{ 'a' * 7 * 10 ** 7 }}", "writes 70,000,000 characters|takes longer"),
        ("{{ (" * 5000, "nested too deeply|syntax error"),
    ],
)  # fmt: skip
def test_a_template_has_limits_of_time_and_memory(template, sentence, monkeypatch):
    monkeypatch.setattr(worker_pool, "RENDER_SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(UserError, match=sentence):
        ChatTemplate("t", template).render(ChatInput(CHAT), trusted={})
    assert time.monotonic() - begun < 60


def test_chats_after_one_that_fails_are_rendered():
    template = ChatTemplate("t", "{{ 1 // (messages[0].content | length) }}")
    contents = ["a", "", "ab", "a"]
    chats = [ChatInput([Message("user", content)]) for content in contents]
    actual = list(template.render_all(chats, trusted={}))
    assert [getattr(each, "text", None) for each in actual] == ["1", None, "0", "1"]
    assert "division by zero" in str(actual[1]) or "by zero" in str(actual[1])


def test_a_worker_cannot_access_secrets_or_files(monkeypatch):
    monkeypatch.setenv("ZAYA_API_KEY", "secret")
    for name in (
        "self.__init__.__globals__",
        "''.__class__",
        "cycler.__init__",
        "messages.__class__.__base__",
    ):
        text = f"{{{{ {name}.x }}}}"
        with pytest.raises(UserError, match=r"unsafe|undefined|no attribute"):
            ChatTemplate("t", text).render(ChatInput(CHAT), trusted={})


# Comparison with transformers


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_equal_transformers(name, folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>"
    )
    template = ChatTemplate("t", TEMPLATES[name])
    trusted = {"bos_token": "<bos>", "eos_token": "<eos>"}
    words = ["Hi", " ", "\n", "é", "<b>", "'", "{{ x }}", "\\", "</think>", "&", "<|im_end|>", "ß"]
    for seed in range(8):
        numbers = random.Random(seed)
        chat = [
            Message(role, "".join(numbers.choices(words, k=6)))
            for role in ["user", "assistant"] * numbers.randrange(1, 3)
        ]
        for add in (False, True):
            expected = theirs.apply_chat_template(
                [message.to_json() for message in chat],
                chat_template=template.text,
                tokenize=False,
                add_generation_prompt=add,
            )
            assert template.render(ChatInput(chat, add), trusted=trusted).text == expected


def test_names_and_variables_reach_the_template():
    template = ChatTemplate("t", "{{ messages[0].name }}|{{ x.y[0] }}|{{ z }}|{{ messages[1].name }}")
    chat = ChatInput(
        [Message("user", "a", "bob"), Message("user", "b")], variables={"x": {"y": ["<eos>"]}, "z": 3}
    )
    rendered = template.render(chat, trusted={})
    assert rendered.text == "bob|<eos>|3|"
    assert sum(size for size, origin in rendered.runs if origin == 0) == len("bob<eos>")
