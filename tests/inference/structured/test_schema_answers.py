"""Answers of a random model that a JSON schema constrains, validated by the package `jsonschema`."""

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


MAX_TOKENS = 8000
"""Enough for a random model to end every answer by chance, if it samples."""


def check_answers(seeds, of_engine, **params):
    """Answers by one schema per seed; returns the numbers of complete, cut and refused ones."""
    requests, schemas = [], []
    num_refused = 0
    for seed in seeds:
        schema = SchemaWriter(seed).write()
        try:
            constraint = constraint_of(schema)
        except UserError as error:
            # Alternatives of a random schema may overlap or exclude each other; any other refusal is a bug.
            if "oneOf" not in str(error) and "Unsatisfiable" not in str(error):
                raise
            num_refused += 1
            continue
        schemas.append(schema)
        requests.append(request_of(constraint, seed=seed, **SAMPLING[seed % len(SAMPLING)] | params))
    num_complete = 0
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for schema, answer in zip(schemas, run_all(of_engine, requests), strict=True):
        assert answer.end in ("stop", "length"), answer.error
        if answer.end == "stop":
            num_complete += 1
            value = json.loads(answer.text)
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=checker)
    return num_complete, len(schemas) - num_complete, num_refused


def test_complete_answers_match_their_schemas():
    num_complete, num_cut, num_refused = check_answers(range(NUM_QUICK), engine())
    assert num_complete >= 0.7 * NUM_QUICK, (num_complete, num_cut, num_refused)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_200_schemas():
    """All answers end, because the model samples and has tokens to spare, and all are valid."""
    long = new_engine(max_length=MAX_TOKENS + 100)
    num_complete, num_cut, num_refused = check_answers(
        range(NUM_ALL), long, max_new_tokens=MAX_TOKENS, temperature=1.0
    )
    print(f"{num_complete} answers complete and valid, {num_cut} cut, {num_refused} schemas refused")
    assert num_complete == NUM_ALL


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
