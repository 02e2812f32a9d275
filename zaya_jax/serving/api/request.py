"""Converts bodies of both endpoints to validated requests: prompt tokens and sampling parameters."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from zaya_jax.data.chats.templates.end_tokens import text_end_ids
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.request import Request
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.structured.constraint import Constraint
from zaya_jax.inference.tool_calls.message_parser import ToolParsing
from zaya_jax.serving.api.answer_grammar import AnswerGrammar
from zaya_jax.serving.api.chat_prompt import read_chat_prompt
from zaya_jax.serving.api.request_schema import MAX_CHOICES, ChatBody, CompletionBody, RequestBody
from zaya_jax.serving.api.response_format import read_response_format
from zaya_jax.serving.api.tool_choice import read_tools
from zaya_jax.serving.api.validation import (
    BodyModel,
    check_text,
    invalid_value,
    one_line,
    parse_body,
    preview,
    validate,
)
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.loaded_model import LoadedModel

Body = TypeVar("Body", bound=BodyModel)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A validated request of either endpoint.

    Attributes:
      prompts: tokens of each prompt.
      echoes: text of each prompt if the response repeats it; empty otherwise.
      max_new_tokens: maximum number of generated tokens of each prompt; 0 for a prompt that is only scored.
      end_ids: tokens that end a text.
      temperature: divisor of the logits; 0 selects the most likely token.
      top_p: probability mass to sample from; None for all of it.
      top_k: number of most likely tokens to sample from; None for all tokens.
      seed: seed of the first text of each prompt; the n-th further text has `seed + n`.
      stop: strings that end a text and are not part of it.
      num_choices: number of texts per prompt.
      num_top: number of most likely tokens to report per token; None for no log-probabilities.
      reasoning_start: the beginning of the reasoning that the prompt ends with; "" for none.
      is_chat: whether the response has the form of a chat completion.
      is_streamed: whether the response is a stream of events.
      includes_usage: whether a stream ends with the token counts.
      with_routing: whether the response has the experts of each token.
      skips_specials: whether special tokens are excluded from the text.
      grammar: grammar of the texts; None for any text.
      constraint: the compiled grammar; None for any text, and until it is compiled.
      tool_parsing: how tool calls in the texts are parsed; None if they are not.
      origin: body of an API whose requests are translated to chats; None for a chat or a completion.
    """

    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...] = ()
    max_new_tokens: tuple[int, ...]
    end_ids: tuple[int, ...]
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int
    stop: tuple[str, ...]
    num_choices: int
    num_top: int | None
    reasoning_start: str = ""
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    with_routing: bool
    skips_specials: bool
    grammar: AnswerGrammar | None = None
    constraint: Constraint | None = None
    tool_parsing: ToolParsing | None = None
    origin: BodyModel | None = None

    @property
    def num_texts(self) -> int:
        """Number of texts to generate, of all prompts together."""
        return len(self.prompts) * self.num_choices

    def to_engine(self, index: int) -> Request:
        """Returns the engine's request for one of the texts.

        Args:
          index: number of the text; the texts of a prompt follow one another.
        """
        prompt, choice = divmod(index, self.num_choices)
        params = SamplingParams(
            max_new_tokens=self.max_new_tokens[prompt],
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            # The seed does not depend on the prompt's place: a prompt samples the same text alone and in a
            # list.
            seed=(self.seed + choice) % 2**32,
            stop_token_ids=self.end_ids,
            num_top_logprobs=self.num_top or 0,
            with_routing=self.with_routing,
            constraint=self.constraint,
        )
        return Request(self.prompts[prompt], params)


def read_completion(model: LoadedModel, body: bytes) -> CompletionRequest:
    """Validates the body of a completion.

    Raises:
      ApiError: if the body is invalid, or exceeds a limit.
    """
    parsed = validate(CompletionBody, parse_body(body), model.name)
    if parsed.echo and parsed.routing:
        raise ApiError("routing is only available for generated tokens; omit echo", param="routing")
    prompts = _read_prompts(model, parsed.prompt, parsed.n)
    return CompletionRequest(
        prompts=tuple(tokens for tokens, _ in prompts),
        echoes=tuple(text for _, text in prompts) if parsed.echo else (),
        max_new_tokens=tuple(_max_new_tokens(model, tokens, parsed.max_tokens) for tokens, _ in prompts),
        end_ids=text_end_ids(model.tokenizer),
        num_top=parsed.logprobs,
        is_chat=False,
        **_common_parameters(parsed),
    )


def read_chat(model: LoadedModel, body: bytes) -> CompletionRequest:
    """Validates the body of a chat completion.

    Raises:
      ApiError: if the body is invalid, exceeds a limit, or the model has no chat template.
    """
    return chat_request(model, read_chat_body(ChatBody, model, body))


def read_chat_body(body_model: type[Body], model: LoadedModel, body: bytes) -> Body:
    """Validates the body of an endpoint for chats by its pydantic model.

    Raises:
      ApiError: if the body is invalid, or the model has no chat template.
    """
    # Checked first: no chat can succeed with this model, whatever the body.
    if model.chat_format is None:
        raise ApiError(
            f"{model.name} has no chat template; use /v1/completions, or start the server with "
            "--template zaya or --template FILE"
        )
    return validate(body_model, parse_body(body), model.name)


def chat_request(
    model: LoadedModel, parsed: ChatBody, *, origin: BodyModel | None = None
) -> CompletionRequest:
    """Returns the request of a validated chat.

    Args:
      model: model with a chat format.
      parsed: the body.
      origin: body of another API that the chat is translated from; None for none.

    Raises:
      ApiError: if the chat exceeds a limit, or its template or tools refuse it.
    """
    chat_format = model.chat_format
    assert chat_format is not None, "checked when the body was read"
    tools = read_tools(model, parsed)
    chat = read_chat_prompt(parsed, tools.prompt_tools)
    common = _common_parameters(parsed)
    common["grammar"] = _chat_grammar(parsed, tools.grammar)
    if common["grammar"] is not None and chat.continue_final_message:
        param = common["grammar"].param
        raise ApiError(f"{param} needs a new message; omit continue_final_message", param=param)
    _check_capacity(model, parsed.n)
    try:
        prompt = chat.encode(chat_format)
        reasoning_start = chat.reasoning_start(chat_format, prompt)
    except UserError as error:  # the template refuses the conversation
        raise ApiError(one_line(error), param="messages") from None
    return CompletionRequest(
        prompts=(prompt,),
        max_new_tokens=(_max_new_tokens(model, prompt, _max_chat_tokens(parsed)),),
        end_ids=chat_format.end_ids,
        num_top=(parsed.top_logprobs or 0) if parsed.logprobs else None,
        reasoning_start=reasoning_start,
        is_chat=True,
        tool_parsing=tools.parsing,
        origin=origin,
        **common,
    )


def _chat_grammar(body: ChatBody, call: AnswerGrammar | None) -> AnswerGrammar | None:
    """Returns the grammar of a chat's answer: that of `response_format`, or of a required call."""
    # An answer follows one grammar: JSON in the content and a call cannot both be the whole of it.
    answer = read_response_format(body.response_format)
    if answer is not None and call is not None:
        raise ApiError(
            f"{answer.param} and a tool_choice that requires a call exclude each other; omit one of them",
            param=answer.param,
        )
    return answer or call


def _common_parameters(body: RequestBody) -> dict[str, Any]:
    return {
        "temperature": body.temperature,
        "top_p": None if body.top_p == 1 else body.top_p,
        # 0 and -1 mean that all tokens are candidates, as at vLLM.
        "top_k": body.top_k if body.top_k > 0 else None,
        # Without a seed, each request samples different texts. The engine's seeds have 32 bits.
        "seed": secrets.randbits(32) if body.seed is None else body.seed % 2**32,
        "stop": tuple(body.stop),
        "num_choices": body.n,
        "is_streamed": body.stream,
        "includes_usage": body.stream_options is not None and body.stream_options.include_usage,
        "with_routing": body.routing,
        "skips_specials": body.skip_special_tokens,
        "grammar": read_response_format(body.response_format),
    }


def _max_chat_tokens(body: ChatBody) -> int | None:
    """Returns the token limit of a chat by either of its names; None if the context is the only limit."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise ApiError(f"max_completion_tokens is {new} and max_tokens is {old}; use only one of them")
    return old if new is None else new


def _read_prompts(model: LoadedModel, value: Any, num_choices: int) -> list[tuple[tuple[int, ...], str]]:
    """Returns tokens and text of each prompt."""
    # A list of numbers is one prompt. So is a list of anything else that is wrong: the error names its item.
    is_list = isinstance(value, list) and any(isinstance(each, str | list) for each in value[:1])
    prompts = value if is_list else [value]
    num_texts = len(prompts) * num_choices
    if num_texts > MAX_CHOICES:
        message = (
            f"{len(prompts)} prompts with n {num_choices} are {num_texts} texts; the maximum is {MAX_CHOICES}"
        )
        raise ApiError(message, param="prompt")
    _check_capacity(model, num_texts)
    return [_read_prompt(model, each) for each in prompts]


def _read_prompt(model: LoadedModel, value: Any) -> tuple[tuple[int, ...], str]:
    tokenizer = model.tokenizer
    if isinstance(value, list):
        tokens = _read_tokens(model, value)
        return tokens, tokenizer.decode(tokens)
    text = check_text("" if value is None else value, "prompt")
    # As in `zaya generate`: text that spells a special token becomes that token, and the prompt starts a
    # document.
    return tuple(tokenizer.delimiters.begin(tokenizer.encode(text, specials=True))), text


def _read_tokens(model: LoadedModel, values: list[Any]) -> tuple[int, ...]:
    if not values:
        raise ApiError("prompt is an empty list; it must have at least one token", param="prompt")
    expected = f"text, or tokens from 0 to {model.vocab_size - 1}, or a list of such prompts"
    for place, token in enumerate(values):
        if isinstance(token, float):
            wrong = f"prompt[{place}] is {preview(token)}, and a token is a whole number"
            raise ApiError(f"{wrong}; a prompt must be {expected}", param="prompt")
        is_integer = isinstance(token, int) and not isinstance(token, bool)
        if not is_integer or not 0 <= token < model.vocab_size:
            raise invalid_value(f"prompt[{place}]", token, expected, param="prompt")
    return tuple(values)


def _check_capacity(model: LoadedModel, num_texts: int) -> None:
    if num_texts > model.capacity:
        raise ApiError(
            f"this request is for {num_texts} texts, and the server can queue {model.capacity}; "
            "split it into several requests",
            param="n",
        )


def _max_new_tokens(model: LoadedModel, prompt: Sequence[int], requested: int | None) -> int:
    """Returns the token limit of a prompt's continuation; by default it fills the context."""
    # A slot has room for max_length tokens of prompt and response together.
    available = model.max_length - len(prompt)
    if requested is None:
        requested = max(available, 1)
    if requested > available:
        raise ApiError(
            f"the prompt has {len(prompt)} tokens and the response may have {requested}; together they must "
            f"not exceed {model.max_length}",
            code="context_length_exceeded",
        )
    return requested
