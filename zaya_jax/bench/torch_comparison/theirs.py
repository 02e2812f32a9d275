"""transformers' side of `zaya bench torch`: each function prepares a program in its own process.

Generation calls the model once per token, with an argmax between, which is less work than `generate` of
transformers does. In eager mode the cache grows (`DynamicCache`), as transformers does by default. Under
`torch.compile` it is static and the experts are computed by whichever of `EXPERTS` is fastest here; the
documentation of transformers recommends a static cache for `torch.compile`, and "batched_mm" for few tokens.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from zaya_jax.bench.torch_comparison.workload import Call, Generation, Training

EXPERTS = ("batched_mm", "grouped_mm")
"""Implementations of experts that `torch.compile` supports, in the words of transformers."""
TRIALS = 3
"""Calls of each setting, of which the fastest counts, to select one."""


def train(workload: Training, *, compiled: bool = False) -> Callable[[], Call]:
    """Returns a call of a clipped AdamW step.

    Args:
      workload: weights and batch.
      compiled: whether to compile the model's forward and backward pass, and to use the fused AdamW.
    """
    import torch

    model, tokens = _network(workload.folder).train(), torch.from_numpy(workload.tokens)
    if compiled:
        model.compile()
    adamw = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=compiled)

    def call() -> Call:
        start = time.perf_counter()
        adamw.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        seconds = time.perf_counter() - start
        return Call({"train": seconds}, {"loss": loss.detach().numpy()})

    return call


def generate(workload: Generation) -> Callable[[], Call]:
    """Returns a call that continues the prompts in eager mode."""
    from transformers import DynamicCache

    model = _network(workload.folder)
    return functools.partial(
        _generate, model, lambda: DynamicCache(config=model.config), workload, "growing cache"
    )


def generate_compiled(workload: Generation) -> Callable[[], Call]:
    """Returns a call that continues the prompts under `torch.compile`, in the fastest setting.

    The settings are static and growing caches, and the implementations of experts.
    """
    programs = [_compiled(workload, experts) for experts in EXPERTS]
    # Prefill and decoding are separate programs to their users as well: each gets its best setting.
    fastest = {part: _fastest(programs, part) for part in ("prefill", "decode")}
    if fastest["prefill"] is fastest["decode"]:
        return fastest["prefill"]
    return functools.partial(_best_parts, fastest)


def _fastest(programs: list[Callable[[], Call]], part: str) -> Callable[[], Call]:
    def seconds(program: Callable[[], Call]) -> float:
        return min(program().seconds[part] for _ in range(TRIALS))

    return min(programs, key=seconds)


def _best_parts(programs: dict[str, Callable[[], Call]]) -> Call:
    calls = {part: program() for part, program in programs.items()}
    seconds = {part: call.seconds[part] for part, call in calls.items()}
    setting = ", ".join(f"{part}: {call.setting}" for part, call in calls.items())
    return dataclasses.replace(calls["decode"], seconds=seconds, setting=setting)


def _compiled(workload: Generation, experts: str) -> Callable[[], Call]:
    """Returns a compiled program after the calls that compile it."""
    import torch
    from transformers import StaticCache

    model = _network(workload.folder)
    model.set_experts_implementation(experts)
    cache = StaticCache(config=model.config, max_cache_len=workload.prompt + workload.new)
    config = model.config
    # Otherwise the compiled prefill would allocate the cache.
    heads = config.num_key_value_heads, config.head_dim
    cache.early_initialization(workload.batch, *heads, torch.float32, torch.device("cpu"))

    def empty() -> Any:
        cache.reset()  # a new cache would be compiled again
        return cache

    model.forward = torch.compile(model.forward)
    call = functools.partial(_generate, model, empty, workload, f"static cache, {experts}")
    # The first call creates the states of the cache, and the second one finds them.
    call(), call()
    return call


def _generate(model: Any, make_cache: Callable[[], Any], workload: Generation, setting: str) -> Call:
    import torch

    prompts = torch.from_numpy(workload.prompts)
    moments, tokens, logits = [time.perf_counter()], [], []
    with torch.no_grad():
        cache, new = make_cache(), prompts
        for number in range(workload.new):
            first = 0 if number == 0 else workload.prompt + number - 1
            positions = torch.arange(first, first + new.shape[1])[None]
            out = model(
                input_ids=new, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            logits.append(out.logits[:, -1])
            new = logits[-1].argmax(dim=-1, keepdim=True)
            tokens.append(new)
            if number == 0:
                moments.append(time.perf_counter())
        moments.append(time.perf_counter())
        # Not timed: our side computes log-probabilities within its loop.
        logprobs = torch.log_softmax(torch.stack(logits, 1), -1).gather(-1, torch.stack(tokens, 1))[..., 0]
    prefill, decode = np.diff(moments).tolist()
    outputs = {"tokens": torch.cat(tokens, 1).numpy(), "log-probabilities": logprobs.numpy()}
    return Call({"prefill": prefill, "decode": decode}, outputs, setting)


def compile_a_sum() -> Callable[[], Any]:
    """The smallest use of `torch.compile`: it fails if there is no C++ compiler."""
    import torch

    return functools.partial(torch.compile(lambda x: x + x), torch.ones(3))


def _network(folder: str) -> Any:
    import torch
    from transformers import ZayaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
