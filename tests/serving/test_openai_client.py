"""A `zaya serve` process and the Python clients of its APIs: the texts are those of `complete`."""

import asyncio
import concurrent.futures
import functools
import os
import sys
from typing import Annotated, Literal

import anthropic
import httpx
import jax
import numpy as np
import openai
import pydantic
import pytest
from serving_process import started
from small_runs import make_chat_run

from zaya_jax.data.chats.records import Message
from zaya_jax.inference.completion import complete
from zaya_jax.inference.engine.sampling_params import SamplingParams, as_token_ids
from zaya_jax.inference.loading import load_for_generation

KEY = "a-key-of-this-test"
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "chats"
    make_chat_run(folder)
    return folder


@pytest.fixture(scope="module")
def client(run_folder):
    options = ("--port", "0", "--slots", "3", "--max-length", "128", "--prefix-mib", "0")
    command = [sys.executable, "-m", "zaya_jax.cli", "serve", str(run_folder), *options]
    with started(command, environment=os.environ | {"ZAYA_API_KEY": KEY}) as server:
        with openai.OpenAI(
            base_url=server.address + "/v1", api_key=KEY, max_retries=0, timeout=100
        ) as client:
            yield client
        assert server.end(seconds=60) == 0
        assert KEY not in "".join(server.lines)
        *progress, last = server.lines
        assert "chats at http://" in last
        assert all(line.startswith("[") for line in progress), progress  # no traceback, no warning
        output = "".join(progress)
        assert "weights of step 1 are loaded" in output
        assert "compiling program 1 of 8: prefill of a chunk" in output
        assert "compiling program 6 of 8: sampling of 3 rows with masks" in output
        assert progress[-1].endswith("all 8 programs are compiled\n")


@pytest.fixture(scope="module")
def run(run_folder):
    return load_for_generation(str(run_folder))


def expected(run, prompt, *, eos_id, seed=0, stop=(), **sampling):
    settings = SamplingParams(
        max_new_tokens=NEW_TOKENS, seed=seed, stop_token_ids=as_token_ids(eos_id), stop=stop, **sampling
    )
    (response,) = complete(run.model, run.variables, run.tokenizer, [prompt], settings)
    return response


def expected_text(run, text, **settings):
    prompt = run.tokenizer.delimiters.begin(run.tokenizer.encode(text))
    return expected(run, prompt, eos_id=run.tokenizer.eos_id, **settings)


def expected_chat(run, *turns, **settings):
    chat_format = run.chat_format(None)
    prompt = chat_format.answer_prompt([Message(*turn) for turn in turns])
    return expected(run, prompt, eos_id=chat_format.end_id, **settings)


LONG = "def f(left):\n    right = left + 1\n"
"""As long as the chat of this file, padded: both are then continued by one program."""
ASK = {"model": "chats", "max_tokens": NEW_TOKENS, "seed": 3}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8}], ids=["greedy", "drawn"])
def test_completions(client, run, sampling):
    prompts = [LONG, "é" + LONG, LONG[:36]]
    response = client.completions.create(prompt=prompts, logprobs=2, **ASK, **sampling)
    for prompt, choice in zip(prompts, response.choices, strict=True):
        alone = expected_text(run, prompt, seed=3, **sampling)
        assert (choice.text, choice.finish_reason) == (alone.text, alone.finish_reason)
        # float32 sums in another order differ by some ulps of a logit.
        assert choice.logprobs.token_logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert len(choice.logprobs.tokens) == len(alone.tokens)
    streamed = client.completions.create(prompt=prompts, stream=True, **ASK, **sampling)
    texts = ["", "", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in response.choices]


def test_chats(client, run):
    turns = [("system", "be brief"), ("user", "hi")]
    messages = [{"role": role, "content": content} for role, content in turns]
    alone = expected_chat(run, *turns, seed=3, temperature=0.8)
    response = client.chat.completions.create(
        messages=messages, temperature=0.8, logprobs=True, top_logprobs=3, **ASK
    )
    (choice,) = response.choices
    thought = getattr(choice.message, "reasoning_content", "")
    assert thought + choice.message.content == alone.text  # marks are excluded from both texts
    assert choice.finish_reason == alone.finish_reason
    assert [each.logprob for each in choice.logprobs.content] == pytest.approx(alone.logprobs, abs=1e-4)
    assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)
    assert response.usage.completion_tokens == len(alone.tokens)
    streamed = list(
        client.chat.completions.create(
            messages=messages, temperature=0.8, stream=True, stream_options={"include_usage": True}, **ASK
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == choice.message.content
    assert streamed[-1].usage.total_tokens == response.usage.total_tokens


def test_other_apis_give_the_text_of_a_chat(client):
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(messages=messages, temperature=0, **ASK).choices[0].message
    thought = getattr(chat, "reasoning_content", "")
    response = client.responses.create(
        model="chats", input=messages, temperature=0, max_output_tokens=NEW_TOKENS
    )
    # A text without content has no message item.
    assert response.output_text == chat.content
    address = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0, timeout=100) as claude:
        # The client's newest version has no argument for the temperature, which the API has.
        message = claude.messages.create(
            model="chats", messages=messages, max_tokens=NEW_TOKENS, extra_body={"temperature": 0}
        )
    texts = ["".join(getattr(block, kind, "") for block in message.content) for kind in ("thinking", "text")]
    assert texts == [thought, chat.content]
    assert message.usage.output_tokens == response.usage.output_tokens


class Weather(pydantic.BaseModel):
    """A schema as users of OpenAI's client write it."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy"]
    degrees: Annotated[int, pydantic.Field(ge=-50, le=50)]


def test_answers_of_a_schema(client):
    messages = [{"role": "user", "content": "weather?"}]
    # Room for a thought of this random model; without one the answer takes some 40 tokens.
    ask = {"model": "chats", "messages": messages, "max_tokens": 64}
    schema = Weather.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    num_complete = 0
    for seed in range(6):
        whole = client.chat.completions.create(**ask, seed=seed, response_format=form).choices[0]
        chunks = client.chat.completions.create(**ask, seed=seed, response_format=form, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.message.content
        if whole.finish_reason == "stop":
            num_complete += 1
            Weather.model_validate_json(text)
    assert num_complete
    # OpenAI's client writes the schema of a class, and reads the answer as one.
    number = client.completions.create(
        model="chats", prompt="7 * 6 = ", max_tokens=32, temperature=0,
        extra_body={"response_format": form | {"json_schema": {"name": "n", "schema": {"enum": [41, 42]}}}},
    )  # fmt: skip
    assert number.choices[0].text in ("41", "42")
    assert number.choices[0].finish_reason == "stop"


def test_a_schema_that_takes_too_long_delays_no_other_answer(client):
    slow = {"type": "integer", "multipleOf": 49_999_991}
    form = {"type": "json_schema", "json_schema": {"name": "slow", "schema": slow}}
    messages = [{"role": "user", "content": "hi"}]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        refused = threads.submit(
            client.chat.completions.create, model="chats", messages=messages, response_format=form
        )
        answer = client.chat.completions.create(model="chats", messages=messages, max_tokens=2)
        assert answer.choices
        assert not refused.done(), "the answer did not wait for the schema"
        with pytest.raises(openai.APIStatusError, match=r"could not be compiled|too complex"):
            refused.result()


def test_stop_strings(client, run):
    whole = expected_text(run, LONG, temperature=0.0).text
    stop = whole[3:5]
    response = client.completions.create(prompt=LONG, temperature=0, stop=[stop], **ASK)
    alone = expected_text(run, LONG, temperature=0.0, stop=(stop,))
    assert (response.choices[0].text, response.choices[0].finish_reason) == (alone.text, "stop")
    assert response.usage.completion_tokens == len(alone.tokens)


def test_scores_of_prompts(client, run):
    """A request of lm-eval's local-completions, which compares two log-probabilities for equality."""
    prompt = run.tokenizer.delimiters.begin(run.tokenizer.encode("return left"))
    response = client.completions.create(
        model="chats", prompt=[prompt], max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    forward = jax.jit(lambda tokens_BT: run.model.apply(run.variables, tokens_BT).logits_BTV)
    expected_TV = np.asarray(jax.nn.log_softmax(forward(np.array([prompt], np.int32))[0]))
    logprobs = response.choices[0].logprobs
    own = expected_TV[np.arange(len(prompt) - 1), prompt[1:]]
    assert logprobs.token_logprobs[1:-1] == pytest.approx(own.tolist(), abs=1e-5)
    assert response.choices[0].text.startswith("return left")
    greedy = [
        own == max(top.values())
        for own, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    ]
    assert greedy[:-1] == (expected_TV.argmax(axis=1)[:-1] == prompt[1:]).tolist()
    assert greedy[-1]  # it was generated at temperature 0


def test_routing(client, run):
    response = client.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], extra_body={"routing": True, "top_k": 2}, **ASK
    )
    routing = response.choices[0].routing
    read = [experts for experts in routing["experts"] if experts is not None]
    assert len(routing["experts"]) == response.usage.completion_tokens
    assert len(read) >= len(routing["experts"]) - 1
    assert all(len(experts) == 2 and set(experts) <= {0, 1, 2} for experts in read)
    assert all(
        0 < each <= 1 for probabilities in routing["probabilities"] if probabilities for each in probabilities
    )


def test_errors(client):
    with pytest.raises(openai.NotFoundError, match="model is 'gpt', which does not exist"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="chats", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="must not exceed 128"):
        client.completions.create(model="chats", prompt="a" * 200)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert client.models.list().data[0].id == client.models.retrieve("chats").id == "chats"
    page = httpx.get(str(client.base_url).removesuffix("v1/"))
    assert page.status_code == 200


def test_concurrent_requests_equal_separate_ones(client, run):
    async def ask():
        url = str(client.base_url)
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=100) as many:
            call = functools.partial(
                many.completions.create, model="chats", max_tokens=NEW_TOKENS, temperature=0.8
            )
            return await asyncio.gather(*(call(prompt=LONG, seed=seed) for seed in range(8)))

    response = [answer.choices[0].text for answer in asyncio.run(ask())]
    assert len(set(response)) > 4
    assert response == [expected_text(run, LONG, seed=seed, temperature=0.8).text for seed in range(8)]
