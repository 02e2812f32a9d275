"""The two sides of `zaya bench generation`: our decoder and transformers', on one exported network.

Each is a program for a process of its own. A call continues prompts greedily, and says when tokens came.
"""

import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zaya_jax.bench.loss_memory import resident_memory
from zaya_jax.config import ExecutionConfig
from zaya_jax.convert.pytorch import load_pytorch
from zaya_jax.inference.generate import Settings, cast_matrices, follow
from zaya_jax.model.zaya import Zaya


@dataclasses.dataclass(frozen=True)
class Times:
    """When the tokens of a batch came.

    Attributes:
      first: seconds to the first one of each row, with the reading of the prompts.
      whole: seconds to the last ones, when nobody looks on the way.
      steps: seconds of each step behind the first one, when somebody looks at each token.
    """

    first: float
    whole: float
    steps: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What both sides are asked for.

    Attributes:
      folder: of the exported network.
      vocabulary: of which prompts are made.
      batch: prompts.
      prompt: tokens of each.
      new: tokens that each is continued with.
    """

    folder: str
    vocabulary: int
    batch: int
    prompt: int
    new: int

    @property
    def prompts(self) -> np.ndarray:
        """Tokens, the same on both sides."""
        return np.random.default_rng(0).integers(1, self.vocabulary, (self.batch, self.prompt))


def ours(asked: Asked) -> Callable[[], Times]:
    """Our decoder: a compiled loop over tokens, or a call for each when somebody looks."""
    model, variables = _our_network(asked)
    prompts, settings = asked.prompts.tolist(), Settings(max_new_tokens=asked.new)

    def call() -> Times:
        start = time.perf_counter()
        for _ in follow(model, variables, prompts, settings):
            pass
        whole = time.perf_counter() - start
        moments = [time.perf_counter()]
        for _ in follow(model, variables, prompts, settings, chunk=1):
            moments.append(time.perf_counter())
        first, *steps = np.diff(moments).tolist()
        return Times(first, whole, tuple(steps))

    return call


def _our_network(asked: Asked) -> tuple[Zaya, Any]:
    model, variables = load_pytorch(asked.folder, execution=ExecutionConfig(dtype="float32"))
    return model, jax.device_put(cast_matrices(model, variables))


def theirs(asked: Asked, *, compiled: bool = False) -> Callable[[], Times]:
    """transformers' `generate`, which runs in Python between any two tokens whoever looks."""
    import torch

    model, prompts = _their_network(asked), torch.from_numpy(asked.prompts)
    if compiled:
        # One program for all lengths of the cache, which grows by a token a call.
        model.forward = torch.compile(model.forward, dynamic=True)
    moments = []

    def look(tokens: Any, scores: Any, **_: Any) -> Any:
        del scores
        moments.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool)

    def call() -> Times:
        moments[:] = [time.perf_counter()]
        model.generate(
            prompts,
            max_new_tokens=asked.new,
            min_new_tokens=asked.new,
            do_sample=False,
            stopping_criteria=[look],
        )
        first, *steps = np.diff(moments).tolist()
        return Times(first, moments[-1] - moments[0], tuple(steps))

    return call


their_compiled = functools.partial(theirs, compiled=True)


def _their_network(asked: Asked) -> Any:
    import torch
    from transformers import ZayaForCausalLM

    model = ZayaForCausalLM.from_pretrained(asked.folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def our_prefill(asked: Asked) -> Callable[[], int]:
    """Reads the prompts and gives the bytes that the process has more at its highest than before."""
    model, variables = _our_network(asked)
    prompts, settings = asked.prompts.tolist(), Settings(max_new_tokens=1)
    jax.block_until_ready(variables)
    return functools.partial(_added, lambda: [*follow(model, variables, prompts, settings)])


def their_prefill(asked: Asked) -> Callable[[], int]:
    """As `our_prefill`: a forward pass that fills a cache and gives the last logits."""
    import torch

    model, prompts = _their_network(asked), torch.from_numpy(asked.prompts)

    @torch.no_grad()
    def read() -> None:
        model(prompts, use_cache=True, logits_to_keep=1)

    return functools.partial(_added, read)


def _added(call: Callable[[], Any]) -> int:
    """Bytes of memory that a call needs beside what its process has, at most."""
    # What the call before has freed may still be the process's: it would not be added again.
    ctypes.CDLL(None).malloc_trim(0)
    return resident_memory(call)[1]
