"""The tokens that end an answer: those of the template, those of the generation config, and EOS."""

import json

import pytest
from chat_templates import CHATML, DEEPSEEK, GEMMA, LLAMA3, PHI, SPECIALS
from tokenizers import Tokenizer, models, pre_tokenizers

from zaya_jax.config import DataConfig
from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.templates.end_tokens import text_end_ids
from zaya_jax.data.tokenizers.saved_tokenizer import save_tokenizer, saved_chat_template, with_saved_tokenizer
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer, tokenizer_of
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.decoder import pad_end_tokens
from zaya_jax.inference.engine.sampling_params import as_token_ids
from zaya_jax.inference.engine.text_stream import TextWriter


def folder_with(folder, template, generation=None):
    words = ["[UNK]", "user", "model", "assistant", "yes", "a", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(template)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return load_tokenizer(str(folder / "tokenizer.json"))


EOS = 7 + SPECIALS.index("<eos>")
ENDS = {
    "gemma": (GEMMA, None, ["<end_of_turn>", "<eos>"]),
    "gemma, listed": (GEMMA, [EOS, 7 + SPECIALS.index("<end_of_turn>")], ["<end_of_turn>", "<eos>"]),
    "gemma, another listed": (GEMMA, [EOS, 4], ["<end_of_turn>", "<eos>", "yes"]),
    "one listed": (CHATML, 5, ["<|im_end|>", "a", "<eos>"]),
    "null listed": (CHATML, {}.get("x"), ["<|im_end|>", "<eos>"]),
    "outside the vocabulary": (CHATML, [10_000], ["<|im_end|>", "<eos>"]),
    "llama3": (LLAMA3, None, ["<|eot_id|>", "<eos>"]),
    "phi": (PHI, None, ["<|end|>", "<eos>"]),
    "deepseek": (DEEPSEEK, None, ["<eos>"]),
    "the next turn's beginning": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}",
        None,
        ["<|user|>", "<eos>"],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_end_tokens_of_templates(name, tmp_path):
    template, generation, expected = ENDS[name]
    tokenizer = folder_with(tmp_path, template, generation)
    vocabulary = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert load_chat_format(None, tokenizer).end_ids == tuple(map(vocabulary.token_to_id, expected))


def test_other_texts_end_as_the_generation_config_says(tmp_path):
    assert text_end_ids(folder_with(tmp_path, GEMMA, [EOS, 5])) == (EOS, 5)
    (tmp_path / "generation_config.json").unlink()
    assert text_end_ids(load_tokenizer(str(tmp_path / "tokenizer.json"))) == (EOS,)
    assert text_end_ids(load_tokenizer("byte-chat")) == (1,)


@pytest.mark.parametrize("listed", ["x", [1.5], [True], [[1]], {"a": 1}, -1])
def test_an_invalid_generation_config_is_rejected(listed, tmp_path):
    tokenizer = folder_with(tmp_path, GEMMA, listed)
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is .* must be a token id"):
        _ = load_chat_format(None, tokenizer).end_ids


def test_a_run_saves_and_exports_all_end_tokens(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    tokenizer = folder_with(tmp_path / "tokenizer", GEMMA, [EOS, 5])
    data = DataConfig(tokenizer=tokenizer.name)
    save_tokenizer(tmp_path / "run", data, chat_template=LLAMA3)
    kept = tokenizer_of(with_saved_tokenizer(tmp_path / "run", data))
    ends = (7 + SPECIALS.index("<|eot_id|>"), EOS, 5)
    assert json.loads((tmp_path / "run/tokenizer/generation_config.json").read_text())[
        "eos_token_id"
    ] == list(ends)
    assert load_chat_format(saved_chat_template(tmp_path / "run"), kept).end_ids == ends


@pytest.mark.parametrize("is_within", [True, False])
def test_the_end_of_a_turn_is_learned(is_within, tmp_path):
    """The end token is learned even after the block; otherwise no answer would end."""
    end = "<end_of_turn>"
    block = "{% generation %}{{ m.content }}" + (end if is_within else "") + "{% endgeneration %}"
    block += "" if is_within else end
    template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.role == 'assistant' %}" + block
        + "{% else %}{{ m.content }}" + end + "{% endif %}{% endfor %}"
    )  # fmt: skip
    chat_format = load_chat_format(None, folder_with(tmp_path, template))
    encoded = chat_format.encode([Message("user", "a"), Message("assistant", "yes"), Message("user", "a")])
    vocabulary = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    learned = [vocabulary.id_to_token(token) for token in encoded.tokens_T[encoded.learned_T].tolist()]
    assert learned == ["yes", end]


def test_a_text_ends_at_any_end_token():
    tokenizer = load_tokenizer("byte-chat")
    for ends in (260, (1, 260), [260, 1]):
        writer = TextWriter(tokenizer, limit=9, eos_id=ends)
        output = [piece.text for token in [*tokenizer.encode("yes"), 260] for piece in writer.add(token)]
        assert ("".join(output), writer.finish_reason) == ("yes", "stop")


def test_end_tokens_are_padded_to_one_shape():
    assert [as_token_ids(each) for each in (None, 3, (3, 4))] == [(), (3,), (3, 4)]
    assert pad_end_tokens([(), (3,), (3, 4)]).tolist() == [[-1] * 8, [3] + [-1] * 7, [3, 4] + [-1] * 6]
    assert pad_end_tokens([tuple(range(9))]).shape == (1, 16)
