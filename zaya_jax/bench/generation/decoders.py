"""The two decoders that `zaya bench generation` compares, ours and transformers', on one exported network.

Each is a program for its own process. A call continues prompts greedily and records when tokens arrive.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zaya_jax.config import ExecutionConfig
from zaya_jax.convert.pytorch.in_memory import load_pytorch
from zaya_jax.inference.engine.decoder import cast_matrices
from zaya_jax.inference.engine.generate import generate_in_chunks
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.model.zaya import Zaya


@dataclasses.dataclass(frozen=True)
class TokenTimes:
    """Times of a batch's tokens in seconds.

    Attributes:
      first: time to the first token of each row, which includes the prefill.
      whole: time to the last tokens when intermediate tokens are not fetched.
      steps: time of each step after the first when every token is fetched.
    """

    first: float
    whole: float
    steps: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The prompts that both decoders continue.

    Attributes:
      folder: folder of the exported network.
      vocabulary: vocabulary size.
      batch: number of prompts.
      prompt: tokens per prompt.
      new: new tokens per prompt.
    """

    folder: str
    vocabulary: int
    batch: int
    prompt: int
    new: int

    @property
    def prompts(self) -> np.ndarray:
        """Random prompt tokens, shape [batch, prompt], identical for both decoders."""
        return np.random.default_rng(0).integers(1, self.vocabulary, (self.batch, self.prompt))


def ours(workload: Workload) -> Callable[[], TokenTimes]:
    """Our decoder: one compiled loop over all tokens, and again with a call per token."""
    model, variables = _our_network(workload)
    prompts, settings = workload.prompts.tolist(), SamplingParams(max_new_tokens=workload.new)

    def call() -> TokenTimes:
        start = time.perf_counter()
        for _ in generate_in_chunks(model, variables, prompts, settings):
            pass
        whole = time.perf_counter() - start
        moments = [time.perf_counter()]
        # A call for each token, which is fetched: what a reader of the text waits for.
        for _ in generate_in_chunks(model, variables, prompts, settings, chunk=1):
            moments.append(time.perf_counter())
        first, *steps = np.diff(moments).tolist()
        return TokenTimes(first, whole, tuple(steps))

    return call


def _our_network(workload: Workload) -> tuple[Zaya, Any]:
    model, variables = load_pytorch(workload.folder, execution=ExecutionConfig(dtype="float32"))
    # Before the first call, whose time and memory must not include the transfer.
    return model, jax.device_put(cast_matrices(model, variables))


def theirs(workload: Workload, *, compiled: bool = False) -> Callable[[], TokenTimes]:
    """transformers' `generate`, which returns to Python after every token."""
    import torch

    model, prompts = _their_network(workload), torch.from_numpy(workload.prompts)
    if compiled:
        # The cache grows by a token per call: without dynamic shapes every step would compile again.
        model.forward = torch.compile(model.forward, dynamic=True)
    moments = []

    # transformers calls its stopping criteria after every token. This one notes the time and never stops.
    def look(tokens: Any, scores: Any, **_: Any) -> Any:
        del scores
        moments.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool)

    def call() -> TokenTimes:
        # In place, because `look` appends to this list.
        moments[:] = [time.perf_counter()]
        model.generate(
            prompts,
            max_new_tokens=workload.new,
            min_new_tokens=workload.new,
            do_sample=False,
            stopping_criteria=[look],
        )
        first, *steps = np.diff(moments).tolist()
        return TokenTimes(first, moments[-1] - moments[0], tuple(steps))

    return call


their_compiled = functools.partial(theirs, compiled=True)


def _their_network(workload: Workload) -> Any:
    import torch
    from transformers import ZayaForCausalLM

    model = ZayaForCausalLM.from_pretrained(workload.folder, dtype=torch.float32).eval()
    # An end token would stop rows early and change the work.
    model.generation_config.eos_token_id = None
    return model
