"""What a request asks for, checked: bodies of both endpoints become prompts and how they are continued."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from zaya_jax.data.chat_records import ASSISTANT, Message, parse_messages
from zaya_jax.data.chat_template import THINK, THINK_END
from zaya_jax.inference.conversation import SYSTEM
from zaya_jax.inference.engine import Request
from zaya_jax.inference.prompt_scores import MOST_TOP
from zaya_jax.serving.body_fields import (
    BodyFields,
    as_text,
    parse_body,
    refuse_unless_default,
    shown,
    wrong,
)
from zaya_jax.serving.limits import ServingLimits
from zaya_jax.serving.refusals import Refused
from zaya_jax.serving.served import ServedRun

DEFAULT_TOKENS = 16
"""Of a completion that says nothing of its length, as OpenAI has it. Of a chat it may fill the context."""
HIGHEST_TEMPERATURE = 100.0
_DEFAULTS: dict[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
}
_COMPLETION_DEFAULTS: dict[str, Sequence[Any]] = _DEFAULTS | {"suffix": ("",), "best_of": (1,)}
_CHAT_DEFAULTS: dict[str, Sequence[Any]] = _DEFAULTS | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # of no tools
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_NOTES = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields about the request that change no answer, here or at OpenAI."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedTexts:
    """A request that can be answered.

    Attributes:
      prompts: as tokens.
      echoes: the prompts' texts, where they are part of the answer; else empty.
      max_new_tokens: of each prompt; 0 where a prompt is only scored.
      end_id: the token that ends a text.
      temperature: divides the logits; 0 takes the likeliest token.
      top_p: as `zaya_jax.inference.sampling` has it.
      top_k: likewise.
      seed: of the first text of each prompt; the others have the next ones.
      stop: strings before which a text ends.
      num_choices: texts of a prompt.
      num_top: likeliest tokens beside each one; None for no log-probabilities at all.
      begun_thought: what the template writes of a thought before the answer begins.
      is_chat: whether it is answered as a chat.
      is_streamed: whether the texts are sent as they come.
      has_usage: whether a stream ends with the numbers of tokens.
      with_routing: whether tokens tell their experts.
    """

    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...] = ()
    max_new_tokens: tuple[int, ...]
    end_id: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int
    stop: tuple[str, ...]
    num_choices: int
    num_top: int | None
    begun_thought: str = ""
    is_chat: bool
    is_streamed: bool
    has_usage: bool
    with_routing: bool

    def request(self, index: int) -> Request:
        """What the engine is asked for one of the texts."""
        prompt, choice = divmod(index, self.num_choices)
        return Request(
            prompt=self.prompts[prompt],
            max_new_tokens=self.max_new_tokens[prompt],
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            # Of the text's number among those of its prompt: in any list it is what it is alone.
            seed=(self.seed + choice) % 2**32,
            eos_id=self.end_id,
            num_top_logprobs=self.num_top or 0,
            with_routing=self.with_routing,
        )

    @property
    def num_texts(self) -> int:
        """Texts of all prompts together."""
        return len(self.prompts) * self.num_choices


def read_completion(served: ServedRun, limits: ServingLimits, body: bytes) -> AskedTexts:
    """What the body of a completion asks for.

    Raises:
      Refused: for what cannot be.
    """
    fields = BodyFields(parse_body(body))
    _check_model(served, fields)
    num_choices = fields.whole("n", least=1, most=limits.texts, default=1) or 1
    is_echo = fields.flag("echo")
    longest = fields.whole("max_tokens", least=0, most=1 << 31, default=DEFAULT_TOKENS)
    assert longest is not None, "it has a default"
    if longest == 0 and not is_echo:
        raise Refused("max_tokens is 0; it must be at least 1, or 0 with echo", field="max_tokens")
    num_top = fields.whole("logprobs", least=0, most=MOST_TOP)
    refuse_unless_default(fields, _COMPLETION_DEFAULTS)
    common = _read_common(fields, limits)
    prompt = fields.take("prompt")
    fields.refuse_rest()
    if is_echo and common["with_routing"]:
        raise Refused("routing is of the tokens that are written; ask for it without echo", field="routing")
    prompts = _read_prompts(served, limits, prompt, num_choices)
    return AskedTexts(
        prompts=tuple(tokens for tokens, _ in prompts),
        echoes=tuple(text for _, text in prompts) if is_echo else (),
        max_new_tokens=tuple(_limit(served, tokens, longest) for tokens, _ in prompts),
        end_id=served.tokenizer.eos_id,
        num_choices=num_choices,
        num_top=num_top,
        is_chat=False,
        **common,
    )


def read_chat(served: ServedRun, limits: ServingLimits, body: bytes) -> AskedTexts:
    """What the body of a chat completion asks for.

    Raises:
      Refused: for what cannot be.
    """
    fields = BodyFields(parse_body(body))
    _check_model(served, fields)
    chat_format = served.chat_format
    if chat_format is None:
        raise Refused(
            f"{served.name} has learned texts, not chats; ask /v1/completions, or start the server with "
            "--template zaya or that of a Jinja file"
        )
    num_choices = fields.whole("n", least=1, most=limits.texts, default=1) or 1
    longest = _read_answer_length(fields)
    has_logprobs = fields.flag("logprobs")
    num_top = fields.whole("top_logprobs", least=0, most=MOST_TOP)
    if num_top and not has_logprobs:
        raise Refused("top_logprobs goes with logprobs, which must be true", field="top_logprobs")
    refuse_unless_default(fields, _CHAT_DEFAULTS)
    common = _read_common(fields, limits)
    messages = _read_messages(fields.take("messages"), limits)
    fields.refuse_rest()
    _check_places(served, num_choices)
    try:
        prompt = tuple(chat_format.answer_prompt(messages))
        # Asked only where a thought may have begun, for it writes the conversation twice more.
        begun = chat_format.begun_thought(messages) if _has_begun(prompt, chat_format.specials) else ""
    except ValueError as error:  # the template refuses such a conversation
        raise Refused(_plain(error), field="messages") from None
    return AskedTexts(
        prompts=(prompt,),
        max_new_tokens=(_limit(served, prompt, longest),),
        end_id=chat_format.end_id,
        num_choices=num_choices,
        num_top=(num_top or 0) if has_logprobs else None,
        begun_thought=begun,
        is_chat=True,
        **common,
    )


def _has_begun(prompt: Sequence[int], specials: Any) -> bool:
    """Whether a prompt ends within a thought."""
    begins, ends = specials.get(THINK), specials.get(THINK_END)
    last = next((token for token in reversed(prompt) if token in (begins, ends)), None)
    return last is not None and last == begins


def _check_model(served: ServedRun, fields: BodyFields) -> None:
    name = fields.text("model")
    if name is not None and name != served.name:
        message = f"there is no model {shown(name)}; this server has {served.name!a}"
        raise Refused(message, status=404, field="model", code="model_not_found")


def _read_answer_length(fields: BodyFields) -> int | None:
    """The longest answer of a chat, by either of its names; None for as long as the context allows."""
    names = "max_completion_tokens", "max_tokens"
    new, old = (fields.whole(name, least=1, most=1 << 31) for name in names)
    if new is not None and old is not None and new != old:
        raise Refused(f"max_completion_tokens is {new} and max_tokens {old}; give one of them")
    return old if new is None else new


def _read_common(fields: BodyFields, limits: ServingLimits) -> dict[str, Any]:
    """What both endpoints know under the same names."""
    for name in _NOTES:
        fields.take(name)
    # -1 is vLLM's word for all.
    top_k = fields.whole("top_k", least=-1, most=1 << 31)
    top_p = fields.number("top_p", least=0, most=1)
    if top_p == 0:
        raise wrong("top_p", 0, "above 0 and at most 1")
    seed = fields.whole("seed", least=-(1 << 63), most=(1 << 64) - 1)
    is_streamed = fields.flag("stream")
    return {
        "temperature": fields.number("temperature", least=0, most=HIGHEST_TEMPERATURE, default=1.0),
        "top_p": None if top_p == 1 else top_p,
        "top_k": top_k if top_k is not None and top_k > 0 else None,
        "seed": secrets.randbits(32) if seed is None else seed % 2**32,
        "stop": _read_stop(fields.take("stop"), limits),
        "is_streamed": is_streamed,
        "has_usage": _read_stream_options(fields.take("stream_options"), is_streamed=is_streamed),
        "with_routing": fields.flag("routing"),
    }


def _read_stop(value: Any, limits: ServingLimits) -> tuple[str, ...]:
    strings = [] if value is None else value if isinstance(value, list) else [value]
    if len(strings) > limits.stop_strings:
        raise wrong("stop", value, f"at most {limits.stop_strings} strings")
    for text in strings:
        if not 1 <= len(as_text(text, "stop")) <= limits.stop_characters:
            raise wrong("stop", text, f"of 1 to {limits.stop_characters} characters")
    return tuple(strings)


def _read_stream_options(value: Any, *, is_streamed: bool) -> bool:
    """Whether the numbers of tokens are to follow a stream."""
    if value is None:
        return False
    if not isinstance(value, dict):
        raise wrong("stream_options", value, "an object with include_usage")
    if not is_streamed:
        raise Refused("stream_options goes with stream, which must be true", field="stream_options")
    options = BodyFields(value)
    has_usage = options.flag("include_usage")
    refuse_unless_default(options, {"include_obfuscation": (False,), "continuous_usage_stats": (False,)})
    options.refuse_rest()
    return has_usage


def _read_messages(value: Any, limits: ServingLimits) -> Sequence[Message]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of at least one message")
    if len(value) > limits.messages:
        raise wrong("messages", value, f"a list of at most {limits.messages}")
    return [_read_message(each, f"messages[{i}]") for i, each in enumerate(value)]


def _read_message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise wrong(place, value, "an object with role and content")
    fields = BodyFields(value)
    role, content = fields.text("role"), fields.take("content")
    # A thought may be named as DeepSeek does, or as vLLM does by now.
    thought = fields.text("reasoning_content") or fields.text("reasoning") or ""
    refuse_unless_default(
        fields,
        {
            "name": (),
            "refusal": (),
            "tool_calls": ([],),
            "tool_call_id": (),
            "function_call": (),
            "audio": (),
        },
    )
    fields.take("reasoning")
    fields.refuse_rest()
    if role is None or content is None:
        raise Refused(
            f"{place} has no {'role' if role is None else 'content'}; it must have one", field=place
        )
    text = _read_content(content, f"{place}.content")
    if thought and role != ASSISTANT:
        raise Refused(
            f"{place} has reasoning_content; only what the assistant said has a thought", field=place
        )
    if thought:
        text = f"{THINK}{thought}{THINK_END}{text}"
    try:
        # OpenAI's newer models call the system "developer"; templates do not know that name.
        role = SYSTEM if role == "developer" else role
        return parse_messages([{"role": role, "content": text}], place, "messages")[0]
    except ValueError as error:
        raise Refused(_plain(error).replace(", message 1,", ""), field=place) from None


def _read_content(value: Any, place: str) -> str:
    """Some text, or the parts of one."""
    if not isinstance(value, list):
        return as_text(value, place)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise Refused(f"{place} has a part that is no text; this network reads nothing else", field=place)
        texts.append(as_text(part["text"], place))
    return "".join(texts)


def _read_prompts(
    served: ServedRun, limits: ServingLimits, value: Any, num_choices: int
) -> list[tuple[tuple[int, ...], str]]:
    """Tokens and text of each prompt."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        prompts = value
    else:
        prompts = [value]
    if len(prompts) * num_choices > limits.texts:
        message = f"{len(prompts)} prompts with n {num_choices} are {len(prompts) * num_choices} texts"
        raise Refused(f"{message}; one request may have {limits.texts}", field="prompt")
    _check_places(served, len(prompts) * num_choices)
    return [_read_prompt(served, each) for each in prompts]


def _read_prompt(served: ServedRun, value: Any) -> tuple[tuple[int, ...], str]:
    tokenizer = served.tokenizer
    if isinstance(value, list):
        return _read_tokens(served, value), tokenizer.decode(value)
    text = as_text(value, "prompt") if value is not None else ""
    # As zaya generate: what spells a special token is one, and the text begins as a document does.
    return tuple(tokenizer.borders.begin(tokenizer.encode(text, specials=True))), text


def _read_tokens(served: ServedRun, values: list[Any]) -> tuple[int, ...]:
    if not values:
        raise Refused("prompt is an empty list; it must have at least one token", field="prompt")
    for token in values:
        is_whole = isinstance(token, int) and not isinstance(token, bool)
        if not is_whole or not 0 <= token < served.vocab_size:
            right = f"text, or tokens from 0 to {served.vocab_size - 1}, or a list of such prompts"
            raise wrong("prompt", token, right)
    return tuple(values)


def _check_places(served: ServedRun, num_texts: int) -> None:
    if num_texts > served.num_places:
        message = f"this asks for {num_texts} texts; the server takes {served.num_places} at once"
        raise Refused(f"{message}, so that it must be asked in parts", field="n")


def _limit(served: ServedRun, prompt: Sequence[int], longest: int | None) -> int:
    """The longest continuation of a prompt that the context has room for."""
    room = served.max_length - len(prompt)
    if longest is None:
        longest = max(room, 1)
    if longest > room:
        raise Refused(
            f"the prompt has {len(prompt)} tokens and the answer may have {longest}; together they must not "
            f"exceed {served.max_length}",
            code="context_length_exceeded",
        )
    return longest


def _plain(error: Exception) -> str:
    """The sentence of an error of ours; it may repeat what a client wrote."""
    return str(error).encode("ascii", "backslashreplace").decode()[:500]
