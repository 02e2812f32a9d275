"""transformers' side of `zaya bench torch`: each function prepares a program in its own process.

Generation calls the model once per token, with an argmax between, which is less work than `generate` of
transformers does. In eager mode the cache grows (`DynamicCache`), as transformers does by default. Under
`torch.compile` it is static, and decoding computes experts by whichever of `EXPERTS` is fastest here; the
documentation of transformers recommends a static cache for `torch.compile`, and "batched_mm" for few tokens.

In bfloat16 a model that generates is loaded in it, as transformers does with ZAYA1's checkpoints, and
training runs under `torch.autocast`, which keeps float32 weights as our side does.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from zaya_jax.bench.torch_comparison.workload import TOKENS, Call, GenerationWork, TrainingWork

EXPERTS = ("batched_mm", "grouped_mm")
"""Implementations of experts that `torch.compile` supports, in the words of transformers."""
TRIALS = 3
"""Calls of each setting, of which the fastest counts, to select one."""


def train(workload: TrainingWork, *, compiled: bool = False) -> Callable[[], Call]:
    """Returns a call of a clipped AdamW step.

    Args:
      workload: weights and batch.
      compiled: whether to compile the model's forward and backward pass, and to use the fused AdamW.
    """
    import torch

    model, tokens = _network(workload.folder, "float32").train(), torch.from_numpy(workload.tokens)
    if compiled:
        model.compile()
    # The fused form updates the weights in one call instead of in a loop over them.
    adamw = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=compiled)

    def call() -> Call:
        start = time.perf_counter()
        # All of it is timed: a step begins with gradients of zero and ends with new weights.
        adamw.zero_grad()
        # The forward pass alone, as PyTorch advises; the backward pass uses the same types.
        with torch.autocast("cpu", torch.bfloat16, enabled=workload.dtype == "bfloat16"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        seconds = time.perf_counter() - start
        return Call({"train": seconds}, {"loss": loss.detach().numpy()})

    return call


def generate(workload: GenerationWork) -> Callable[[], Call]:
    """Returns a call that continues the prompts in eager mode."""
    from transformers import DynamicCache

    model = _network(workload.folder, workload.dtype)
    return functools.partial(
        _generate, model, model, lambda: DynamicCache(config=model.config), workload, "growing cache"
    )


def generate_compiled(workload: GenerationWork) -> Callable[[], Call]:
    """Returns a call that continues the prompts under `torch.compile`, with the fastest experts in decoding.

    The prefill computes experts as transformers does by default: "batched_mm" would copy the matrices of an
    expert for each of its tokens.
    """
    prefill = _compiled(workload, "grouped_mm")
    programs = [_with_static_cache(workload, prefill, experts) for experts in EXPERTS]

    def seconds(program: Callable[[], Call]) -> float:
        return min(program().seconds["decode"] for _ in range(TRIALS))

    # The other program stays in memory, but only the returned one runs from here on.
    return min(programs, key=seconds)


def _compiled(workload: GenerationWork, experts: str) -> Any:
    import torch

    model = _network(workload.folder, workload.dtype)
    model.set_experts_implementation(experts)
    # As the documentation of transformers compiles a model for generation.
    model.forward = torch.compile(model.forward)
    return model


def _with_static_cache(workload: GenerationWork, prefill: Any, experts: str) -> Callable[[], Call]:
    """Returns a compiled program after the calls that compile it."""
    import torch
    from transformers import StaticCache

    decode, config = _compiled(workload, experts), prefill.config
    cache = StaticCache(config=config, max_cache_len=workload.prompt + workload.new)
    # Otherwise the compiled prefill would allocate the cache.
    heads = config.num_key_value_heads, config.head_dim
    cache.early_initialization(workload.batch, *heads, prefill.dtype, torch.device("cpu"))

    def empty() -> Any:
        cache.reset()  # a new cache would be compiled again
        return cache

    call = functools.partial(_generate, prefill, decode, empty, workload, f"static cache, {experts}")
    # The first call creates the states of the cache, and the second one finds them.
    for _ in range(2):
        call()
    return call


def _generate(
    prefill: Any, decode: Any, make_cache: Callable[[], Any], workload: GenerationWork, setting: str
) -> Call:
    """Continues the prompts greedily: one model reads them, another with the same weights continues."""
    import torch

    prompts = torch.from_numpy(workload.prompts)
    moments, tokens, logits = [time.perf_counter()], [], []
    with torch.no_grad():
        cache, new = make_cache(), prompts
        for number in range(workload.new):
            # The positions are given, because a static cache has its length as a tensor.
            first = 0 if number == 0 else workload.prompt + number - 1
            positions = torch.arange(first, first + new.shape[1])[None]
            options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            out = (decode if number else prefill)(input_ids=new, position_ids=positions, **options)
            logits.append(out.logits[:, -1])
            # Greedy, as on our side: draws of two libraries would differ, and so would the texts.
            new = logits[-1].argmax(dim=-1, keepdim=True)
            tokens.append(new)
            if number == 0:
                moments.append(time.perf_counter())
        moments.append(time.perf_counter())
        # Not timed: our side computes log-probabilities within its loop.
        logprobs = torch.log_softmax(torch.stack(logits, 1).float(), -1).gather(-1, torch.stack(tokens, 1))[
            ..., 0
        ]
    prefill_seconds, decode_seconds = np.diff(moments).tolist()
    seconds = {"prefill": prefill_seconds, "decode": decode_seconds}
    outputs = {TOKENS: torch.cat(tokens, 1).numpy(), "log-probabilities": logprobs.numpy()}
    return Call(seconds, outputs, setting)


def compile_a_sum() -> Callable[[], Any]:
    """The smallest use of `torch.compile`: it fails if there is no C++ compiler."""
    import torch

    return functools.partial(torch.compile(lambda x: x + x), torch.ones(3))


def _network(folder: str, dtype: str) -> Any:
    import torch
    from transformers import ZayaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return ZayaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
