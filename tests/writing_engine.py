"""A fake engine that writes a given text, with a tokenizer that has tokens for the markup of tool calls."""

from fake_engine import FakeEngine, fake_model

from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.inference.tool_calls.markup import MARKUPS

TOKENIZER = load_tokenizer("byte-tools")
FORMAT = load_chat_format("zaya", TOKENIZER)


class WritingEngine(FakeEngine):
    """A fake engine that writes a text, in which names of special tokens are special tokens."""

    def __init__(self, text):
        super().__init__()
        self.text, self.prompts = text, []

    def submit(self, request, on_event):
        self.prompts.append(list(request.prompt))
        return super().submit(request, on_event)

    def tokens_of(self, request):
        whole = [*TOKENIZER.encode(self.text, specials=True), FORMAT.end_id]
        return whole[: request.params.max_new_tokens]


def model_of(engine, **changes):
    fields = {
        "tokenizer": TOKENIZER,
        "chat_format": FORMAT,
        "vocab_size": TOKENIZER.vocab_size,
        "max_length": 4096,
    }
    return fake_model(engine, **(fields | {"tool_markup": MARKUPS["zaya_xml"]} | changes))
