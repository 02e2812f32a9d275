"""Text completion: prompts as token ids to texts, with stop strings and log-probabilities."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.inference.engine.generate import Generation, Prompts, generate_in_chunks, stream
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.engine.text_stream import FinishReason, Piece, TextWriter
from zaya_jax.model.zaya import Zaya

STOP_CHUNK = 32
"""Tokens between two searches for stop strings: the maximum that is generated in vain after one."""
STREAM_CHUNK = 16
"""Tokens between two updates of a streamed text."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
      text: text without special tokens, cut before a stop string.
      tokens: generated tokens, including an end token or those that spell a stop string.
      logprobs: natural logarithm of the probability that the model gave each token, before temperature,
        `top_k` and `top_p`.
      finish_reason: "stop" for an end token or a stop string, "length" for `max_new_tokens`.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def complete(
    model: Zaya,
    variables: Mapping,
    tokenizer: Tokenizer,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    context_devices: int = 1,
) -> list[Completion]:
    """Continues prompts in one batch.

    With parameters for each prompt, its draws are the same in any batch, and its text is too, up to the
    rounding that `zaya_jax.inference.engine.generate` describes. With one for all, the draws depend on the
    prompt's place in the batch.

    Args:
      model: the model.
      variables: its weights.
      tokenizer: tokenizer of the texts.
      prompts: token ids of each prompt.
      params: how all prompts, or each of them, are continued.
      context_devices: number of devices that share the cache.

    Raises:
      UserError: for an invalid prompt or parameter.
    """
    each_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    writers = [text_writer(tokenizer, each) for each in each_params]
    texts, generations = [""] * len(writers), list[Generation]()
    # Without stop strings there is nothing to search for: the device generates everything in one call.
    chunk = STOP_CHUNK if any(each.stop for each in each_params) else None
    for generations in generate_in_chunks(
        model, variables, prompts, params, chunk=chunk, context_devices=context_devices
    ):
        for row, (writer, generation) in enumerate(zip(writers, generations, strict=True)):
            for token in generation.tokens[writer.num_tokens :]:
                # A stop string may end the text within a chunk; the rest of the chunk is not part of it.
                if writer.finish_reason:
                    break
                texts[row] += "".join(piece.text for piece in writer.add(token))
        # Rows that stopped are still decoded until all rows have ended; their later tokens are ignored.
        if all(writer.finish_reason for writer in writers):
            break
    return list(map(_completion, texts, writers, generations))


def _completion(text: str, writer: TextWriter, generation: Generation) -> Completion:
    assert writer.finish_reason is not None, "generation continues up to the limit of each row"
    num_tokens = writer.num_tokens
    tokens, logprobs = generation.tokens[:num_tokens], generation.logprobs[:num_tokens]
    return Completion(text, tokens, logprobs, writer.finish_reason)


def stream_text(
    model: Zaya,
    variables: Mapping,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    marks: Mapping[int, str] | None = None,
    context_devices: int = 1,
) -> Iterator[Piece]:
    """Continues one prompt and yields its text as it is generated; it equals the text of `complete`.

    Text that may be the beginning of a stop string is held back until it is known not to be one.

    Args:
      model: the model.
      variables: its weights.
      tokenizer: tokenizer of the texts.
      prompt: token ids.
      params: how the prompt is continued.
      marks: names of special tokens that are yielded, as separate pieces, by token id.
      context_devices: number of devices that share the cache.

    Raises:
      UserError: as `complete`, at the call and not at the first piece.
    """
    options = {"chunk": STREAM_CHUNK, "context_devices": context_devices}
    return text_of(tokenizer, stream(model, variables, prompt, params, **options), params, marks=marks)


def text_of(
    tokenizer: Tokenizer,
    tokens: Iterator[int],
    params: SamplingParams,
    *,
    marks: Mapping[int, str] | None = None,
) -> Iterator[Piece]:
    """Yields the text of tokens as they arrive; the other arguments are those of `stream_text`."""
    writer = text_writer(tokenizer, params, marks)
    for token in tokens:
        yield from writer.add(token)
        if writer.finish_reason:
            return


def text_writer(
    tokenizer: Tokenizer, params: SamplingParams, marks: Mapping[int, str] | None = None
) -> TextWriter:
    """Returns the writer of a text that is continued with these parameters."""
    limit, end_ids = params.max_new_tokens, params.stop_token_ids
    return TextWriter(tokenizer, limit=limit, eos_id=end_ids, stop=params.stop, marks=marks)
