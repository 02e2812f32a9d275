"""Runs on chats and their exports: transformers has the same tokens and the same end of an answer."""

import dataclasses
import json

import jax
import pytest
import torch
from huggingface_reference import build
from small_runs import small_config
from transformers import AutoTokenizer, ZayaForCausalLM

from zaya_jax import cli
from zaya_jax.checkpoint import run_lock
from zaya_jax.config import DataConfig, ModelConfig
from zaya_jax.convert.companion_files import Companions, of_tokenizer
from zaya_jax.convert.output_files import run_folder_files
from zaya_jax.convert.pytorch.huggingface import by_path
from zaya_jax.convert.pytorch.in_memory import VariableWeights
from zaya_jax.convert.stream import NoProgress, write_folder
from zaya_jax.data.chats.chat_corpus import build_chat_corpus
from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import ChatFormat, load_chat_format
from zaya_jax.data.chats.templates.template import ChatTemplate
from zaya_jax.data.tokenizers.saved_tokenizer import save_tokenizer, saved_chat_template, with_saved_tokenizer
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer, tokenizer_of
from zaya_jax.data.tokenizers.training import CHAT_SPECIALS, train_tokenizer
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.heartbeats import Heartbeats
from zaya_jax.train.setup import prepare_run

CHAT = [
    Message("system", "s é"),
    Message("user", "<eos>?"),
    Message("assistant", "<think>\nhm\n</think>\n\nyes"),
]
# Not the built-in template: an export that fell back to that one would write other tokens.
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + ': ' }}
    {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant: ' }}{%- endif %}
"""
END = 260


def theirs_of(tokenizer, messages, **options):
    chat = [{"role": message.role, "content": message.content} for message in messages]
    return tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **options)


def assert_same_chats(ours: ChatFormat, folder) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    encoded, output = ours.encode(CHAT[:1] + CHAT[2:]), CHAT[:1] + CHAT[2:]
    actual = theirs_of(theirs, output)
    assert actual["input_ids"] == encoded.tokens_T.tolist()
    assert actual["assistant_masks"] == encoded.learned_T.astype(int).tolist()
    prompt = theirs_of(theirs, [Message("user", "the cat")], add_generation_prompt=True)
    assert prompt["input_ids"] == ours.prompt("the cat")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has started on chats as bytes, written with a custom template."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "template.jinja").write_text(TEMPLATE)
    lines = [
        json.dumps(
            {"messages": [dataclasses.asdict(m) for m in CHAT] + [{"role": "user", "content": f"{i}"}]}
        )
        for i in range(9)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    build_chat_corpus(
        folder / "corpus", source=folder / "chats.jsonl", tokenizer=load_tokenizer("byte-chat"),
        template=str(folder / "template.jinja"), sequence_length=64, validation_percent=20,
    )  # fmt: skip
    pair = build(0, vocab_size=264, lm_head_bias=True)
    config = dataclasses.replace(
        small_config(run_folder=folder / "run", corpus=folder / "corpus"), model=pair.config
    )
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="byte-chat"))
    weights = VariableWeights(pair.config, by_path(pair.config, pair.variables))
    nothing = Companions({}, {}, ())
    files = run_folder_files(weights, nothing, folder / "run", dtype=None, run=config, step=0)
    write_folder(weights, files, folder / "run", NoProgress())
    # All that training does before it compiles.
    with run_lock(config.run_folder) as lock:
        prepare_run(config, data_mesh(jax.devices()[:1]), lock, heartbeats=Heartbeats(), overwrite=False)
    return folder / "run"


def test_the_export_of_a_run_on_chats(run, tmp_path):
    assert sorted(path.name for path in (run / "tokenizer").iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
    ]
    cli.main(["convert", str(run), str(tmp_path / "native")])
    ours = ChatFormat(ChatTemplate("t", TEMPLATE), load_tokenizer("byte-chat"))
    assert_same_chats(ours, tmp_path / "native")
    model = ZayaForCausalLM.from_pretrained(tmp_path / "native")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [END, 1]
    # Simulates a longer training: the next token is the end of the turn, or of a text.
    for number in (END, 1):
        model.lm_head.bias.data.zero_()[number] = 1e4
        prompt = torch.tensor([ours.prompt("the cat")])
        answer = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
        assert answer.tolist() == [number]


def test_a_run_made_of_the_export_or_of_the_run_chats_alike(run, tmp_path):
    cli.main(["convert", str(run), str(tmp_path / "native")])
    cli.main(["convert", str(tmp_path / "native"), str(tmp_path / "imported")])
    cli.main(["convert", str(run), str(tmp_path / "copy"), "--layout", "zaya"])
    for folder in (run, tmp_path / "imported", tmp_path / "copy"):
        assert (
            load_chat_format(saved_chat_template(folder), load_tokenizer("byte-chat")).template.text
            == TEMPLATE
        )
    cli.main(["convert", str(tmp_path / "copy"), str(tmp_path / "again")])
    for name in ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "native" / name).read_bytes()


@pytest.mark.parametrize("neighbor", [None, {"eos_token_id": 1}, {"eos_token_id": [6, 1], "top_p": 0.5}])
def test_a_tokenizer_file_with_its_neighboring_files(neighbor, tmp_path):
    """Also a template other than the one of the chats, and another end token."""
    (tmp_path / "texts").mkdir()
    for i in range(3):
        (tmp_path / f"texts/{i}.txt").write_text("the cat sat on the mat. yes? é " * 9 + str(i))
    made = train_tokenizer(
        tmp_path / "made", source=str(tmp_path / "texts"), vocab_size=300, specials=CHAT_SPECIALS
    )
    (tmp_path / "made/chat_template.jinja").write_text("{{ messages[0].content }}")
    if neighbor is not None:
        (tmp_path / "made/generation_config.json").write_text(json.dumps(neighbor))
    data = DataConfig(tokenizer=str(made.file))
    ours = ChatFormat(ChatTemplate("t", TEMPLATE), tokenizer_of(data))
    save_tokenizer(tmp_path / "run", data, chat_template=TEMPLATE)
    save_tokenizer(tmp_path / "run", data, chat_template=TEMPLATE)
    companions = of_tokenizer(
        with_saved_tokenizer(tmp_path / "run", data), ModelConfig(vocab_size=512), story=()
    )
    (tmp_path / "out").mkdir()
    for name, content in companions.files.items():
        (tmp_path / "out" / name).write_bytes(content)
    assert_same_chats(ours, tmp_path / "out")
    ends = [ours.end_id, *([6, 1] if neighbor and "top_p" in neighbor else [1])]
    generation = json.loads(companions.files["generation_config.json"])
    assert companions.token_ids["eos_token_id"] == generation["eos_token_id"] == list(dict.fromkeys(ends))
    assert generation.get("top_p") == (neighbor or {}).get("top_p")


def test_special_tokens_are_those_that_the_config_names(tmp_path):
    """Also one that is an ordinary token in the file; here they differ from those that detection would
    find.
    """
    (tmp_path / "texts").mkdir()
    for i in range(3):
        (tmp_path / f"texts/{i}.txt").write_text("the cat sat on the mat " * 9 + str(i))
    made = train_tokenizer(
        tmp_path / "made", source=str(tmp_path / "texts"), vocab_size=300, specials=CHAT_SPECIALS
    )
    values = json.loads(made.file.read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    end = max(values["model"]["vocab"].values()) + 1
    values["added_tokens"].append({"id": end, "content": "[END]", **plain})
    made.file.write_text(json.dumps(values))
    data = DataConfig(tokenizer=str(made.file), bos_token="<eos>", eos_token="[END]")
    turn = "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    template = f"{{{{ bos_token }}}}{{% for m in messages %}}{turn}{{% endfor %}}"
    ours = ChatFormat(ChatTemplate("t", template), tokenizer_of(data))
    tokens = ours.encode([Message("assistant", "a"), Message("user", "a[END]b<eos>")]).tokens_T.tolist()
    begin = tokenizer_of(DataConfig(tokenizer=str(made.file))).eos_id
    assert [(i, t) for i, t in enumerate(tokens) if t in (begin, end)] == [
        (0, begin), (2, end), (len(tokens) - 1, end),
    ]  # fmt: skip
    assert tokenizer_of(data).decode(tokens) == "aa[END]b<eos>"

    save_tokenizer(tmp_path / "run", data, chat_template=template)
    companions = of_tokenizer(
        with_saved_tokenizer(tmp_path / "run", data), ModelConfig(vocab_size=512), story=()
    )
    for name, content in companions.files.items():
        (tmp_path / name).write_bytes(content)
    assert_same_chats(ours, tmp_path)


def test_a_run_on_documents_ends_texts_with_eos(tmp_path):
    data = dataclasses.replace(small_config(run_folder=tmp_path, corpus=tmp_path).data, tokenizer="byte-chat")
    save_tokenizer(tmp_path, data, chat_template=None)
    assert list(tmp_path.iterdir()) == []
    companions = of_tokenizer(with_saved_tokenizer(tmp_path, data), ModelConfig(vocab_size=264), story=())
    assert companions.token_ids["eos_token_id"] == 1
    assert "chat_template.jinja" not in companions.files
