"""Markovian RSA as plain loops, after [ZAYA1-8B] section VI-A: no batch, no cache.

It shares with the tested code only the network, the tokenizer, and the meaning of a seed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

LENGTH = 128


@dataclasses.dataclass
class Trace:
    subset: list
    prompt: str
    tokens: list


def rollout(forward, prompt_tokens, *, budget, end_id, seed, temperature):
    """Samples token by token, each with a pass over the whole text."""
    key, written = jax.random.key(seed), []
    while len(written) < budget and (not written or written[-1] != end_id):
        text = [*prompt_tokens, *written]
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(text)] = text
        logits = jnp.asarray(forward(padded)[0, len(text) - 1], jnp.float32)
        draw = jax.random.fold_in(jax.random.fold_in(key, len(written)), 0)
        written.append(int(jax.random.categorical(draw, (logits - logits.max()) / temperature)))
    return written


def markovian_rsa(
    forward, tokenizer, question, *, N, C, T, beta, tau, answer_budget, end_id, seed, temperature
):
    """Returns all rounds of traces. A prompt is the question, followed by each tail after a bar."""
    rounds = []
    for t in range(T + 1):
        population = []
        for i in range(N):
            if t == 0:
                subset = []
            elif C == 1:
                subset = [i]
            else:
                subset = np.random.default_rng((seed, t, i, 1)).choice(N, C, replace=False).tolist()
            prompt = question
            for j in subset:
                trace = [token for token in rounds[t - 1][j].tokens if token != end_id]
                prompt += "|" + tokenizer.decode(trace[-tau:])
            token_seed = np.random.SeedSequence((seed, t, i)).generate_state(1)[0]
            budget = answer_budget if t == T else beta
            tokens = rollout(
                forward,
                tokenizer.encode(prompt),
                budget=budget,
                end_id=end_id,
                seed=int(token_seed),
                temperature=temperature,
            )
            population.append(Trace(subset, prompt, tokens))
        rounds.append(population)
    return rounds
