"""Answers of a random model that a JSON schema constrains, validated by the package `jsonschema`."""

import dataclasses
import json
import statistics
import time

import jsonschema
import pytest
from constrained_texts import constraint_of, engine, new_engine, request_of, run_all
from random_schemas import SchemaWriter

from zaya_jax.errors import UserError

NUM_QUICK, NUM_ALL = 20, 200
SAMPLING = (
    {},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 3.0, "top_p": 0.9, "top_k": 40, "num_top_logprobs": 2, "with_routing": True},
)


MAX_TOKENS = 2000
UNFILTERED = {"temperature": 1.5, "top_p": 1.0, "top_k": 0}
"""Every token that the schema allows may come; a filter may exclude the end of a string for good."""
MAX_TRIALS = 6


@dataclasses.dataclass(frozen=True)
class Ends:
    """Numbers of the schemas whose answers were complete and valid, cut, and of the refused schemas."""

    complete: list[int]
    cut: list[int]
    refused: list[int]


def check_answers(numbers, of_engine, *, trial=0, **params):
    """Validates an answer by each of these schemas; a later trial samples with other seeds."""
    requests, schemas, refused = [], {}, []
    for number in numbers:
        schema = SchemaWriter(number).write()
        try:
            constraint = constraint_of(schema)
        except UserError as error:
            # Alternatives of a random schema may overlap or exclude each other; any other refusal is a bug.
            if "oneOf" not in str(error) and "Unsatisfiable" not in str(error):
                raise
            refused.append(number)
            continue
        schemas[number] = schema
        sampling = SAMPLING[number % len(SAMPLING)] | params
        requests.append(request_of(constraint, seed=number + 1000 * trial, **sampling))
    complete, cut = [], []
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for (number, schema), answer in zip(schemas.items(), run_all(of_engine, requests), strict=True):
        assert answer.end in ("stop", "length"), answer.error
        (complete if answer.end == "stop" else cut).append(number)
        if answer.end == "stop":
            value = json.loads(answer.text)
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=checker)
    return Ends(complete, cut, refused)


def test_complete_answers_match_their_schemas():
    ends = check_answers(range(NUM_QUICK), engine())
    assert len(ends.complete) >= 0.7 * NUM_QUICK, ends


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_200_schemas():
    """Every schema has a complete answer, and all of them are valid.

    A random model may open objects within objects without end, where a schema allows any further fields; then
    another one is sampled.
    """
    long, left = new_engine(max_length=MAX_TOKENS + 100), range(NUM_ALL)
    for trial in range(MAX_TRIALS):
        ends = check_answers(left, long, trial=trial, max_new_tokens=MAX_TOKENS, **UNFILTERED)
        print(f"{len(ends.complete)} complete and valid, {len(ends.cut)} cut, {len(ends.refused)} refused")
        assert not ends.refused
        left = ends.cut
        if not left:
            break
    assert not left


@pytest.mark.campaign
def test_speed_with_and_without_a_schema():
    """Prints tokens per second of the same requests: with a schema in none, in one and in all of them."""
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    constraint = constraint_of({"type": "array", "items": number, "minItems": 200, "maxItems": 200})
    for num_rows, num_constrained in ((1, 0), (1, 1), (4, 0), (4, 1), (4, 4)):
        constraints = [constraint] * num_constrained + [None] * (num_rows - num_constrained)
        rates = []
        for repeat in range(4):
            # The schema ends no answer before its 300 tokens.
            requests = [
                request_of(each, max_new_tokens=300, stop_token_ids=(1,), seed=repeat + row)
                for row, each in enumerate(constraints)
            ]
            start = time.perf_counter()
            answers = run_all(engine(), requests)
            num_tokens = sum(len(answer.tokens) for answer in answers)
            rates.append(num_tokens / (time.perf_counter() - start))
            assert num_tokens >= 300 * num_constrained
        # The first repeat compiles.
        rate = statistics.median(rates[1:])
        print(f"{num_rows} requests, {num_constrained} with a schema: {rate:.0f} tokens/s in all")
