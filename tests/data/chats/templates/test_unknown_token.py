"""The unknown token represents words that a tokenizer lacks; templates do not write it."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import UserError

TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + eos_token + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def chat_format(folder, *, single_word):
    """A tokenizer of words whose end token is, or is not, a token directly after a word."""
    words = ["<unk>", "</s>", "<|im_start|>", "user", "assistant", "good"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<|im_start|>", AddedToken("</s>", single_word=single_word)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_chat_format(None, load_tokenizer(str(folder / "tokenizer.json")))


def test_an_unknown_word_does_not_end_a_turn(tmp_path):
    with pytest.raises(UserError, match="has no special token of the tokenizer"):
        chat_format(tmp_path, single_word=True)


def test_unknown_words_count_as_text(tmp_path):
    encoded = chat_format(tmp_path, single_word=False).encode([Message("user", "bad good <unk>")])
    # By hand: the start, the role, <unk> for "bad", and the known word.
    assert encoded.tokens_T.tolist()[:4] == [2, 3, 0, 5]
    assert encoded.tokens_T.tolist()[-1] == 1
    assert encoded.text_bytes == len("user\nbad good <unk>\n")
