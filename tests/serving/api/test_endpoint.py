"""Clients that disconnect, do not read, or request too much: slots are freed, and others are not affected."""

import asyncio
import time

import pytest
from fake_engine import FakeEngine
from serving_client import Client, client, serving

from zaya_jax.serving.http.limits import ServingLimits

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 400, "seed": 5}


async def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        await asyncio.sleep(0.005)


def cancelled(service, why):
    return service.metrics.cancelled.labels(why)._value.get()


def is_idle(engine):
    stats = engine.stats()
    return (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_slots(stream):
    engine = FakeEngine(step_seconds=0.01)

    async def run():
        async with serving(engine) as (service, application):
            one = Client(application, COMPLETIONS, LONG | {"stream": stream, "n": 6})
            await until(lambda: engine.num_generated > 20)
            one.leave()
            await one.task
            await until(lambda: is_idle(engine))
            assert engine.num_generated < 6 * 300
            assert (cancelled(service, "gone"), service.num_responses) == (1, 0)

    asyncio.run(run())


def test_a_disconnect_while_waiting_for_a_slot():
    engine = FakeEngine(num_slots=1, step_seconds=0.002)

    async def run():
        async with serving(engine) as (_, application):
            first = Client(application, COMPLETIONS, LONG | {"max_tokens": 40})
            await until(lambda: engine.num_generated > 2)
            others = [Client(application, COMPLETIONS, LONG) for _ in range(5)]
            await until(lambda: engine.stats().waiting == 5)
            for other in others:
                other.leave()
            await asyncio.gather(first.task, *(other.task for other in others))
            assert first.status == 200
            assert [other.status for other in others] == [None] * 5
            await until(lambda: is_idle(engine))
            assert engine.num_generated <= 40

    asyncio.run(run())


def test_a_client_that_does_not_read_is_disconnected_and_others_continue():
    engine = FakeEngine(step_seconds=0.0005)
    limits = ServingLimits(send_seconds=0.3)

    async def run():
        async with serving(engine, limits=limits) as (service, application):
            slow = Client(application, COMPLETIONS, LONG | {"stream": True}, reads=False)
            quick = [
                Client(application, COMPLETIONS, LONG | {"stream": True, "seed": seed}) for seed in range(3)
            ]
            await asyncio.gather(*(each.task for each in quick))
            assert all(b"[DONE]" in each.parts[-2] + each.parts[-1] for each in quick)
            await slow.task
            assert slow.aborted
            assert cancelled(service, "slow") == 1
            await until(lambda: is_idle(engine))

    asyncio.run(run())


def test_unread_events_are_bounded():
    engine = FakeEngine(step_seconds=0.0005)

    async def run():
        async with serving(engine, limits=ServingLimits(unread_events=10)) as (service, application):
            slow = Client(application, COMPLETIONS, LONG | {"stream": True}, reads=False)
            # The number of unread events ends it; the time limit would be 30 seconds.
            await until(lambda: engine.num_generated > 0 and is_idle(engine), 5)
            assert engine.num_generated < 100
            slow.reads.set()
            await slow.task
            assert slow.aborted
            assert cancelled(service, "slow") == 1

    asyncio.run(run())


def test_a_full_queue_refuses_all_texts_of_a_request():
    engine = FakeEngine(num_slots=1, max_waiting=3, step_seconds=0.002)

    async def run():
        async with serving(engine) as (_, application), client(application) as http:
            one = Client(application, COMPLETIONS, LONG)
            await until(lambda: engine.stats().running == 1)
            refused = await http.post(COMPLETIONS, json=LONG | {"n": 4, "max_tokens": 2})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            await until(lambda: all(ticket.is_cancelled for ticket in engine.waiting))
            one.leave()
            await one.task
            await until(lambda: is_idle(engine))
            assert (await http.post(COMPLETIONS, json=LONG | {"n": 3, "max_tokens": 2})).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_takes_too_long_is_cancelled(stream):
    engine = FakeEngine(step_seconds=0.02)

    async def run():
        async with serving(engine, limits=ServingLimits(request_seconds=0.3)) as (service, application):
            one = Client(application, COMPLETIONS, LONG | {"stream": stream})
            await one.task
            assert one.status == (200 if stream else 504)
            assert b"the response was not complete after 0.3 seconds" in b"".join(one.parts)
            assert b"[DONE]" not in b"".join(one.parts)
            assert cancelled(service, "late") == 1
            await until(lambda: is_idle(engine))

    asyncio.run(run())


def test_draining_finishes_what_it_can():
    engine = FakeEngine(step_seconds=0.002)

    async def run():
        async with serving(engine) as (service, application):
            short = Client(application, COMPLETIONS, LONG | {"max_tokens": 30})
            long = [Client(application, COMPLETIONS, LONG | {"stream": stream}) for stream in (False, True)]
            await until(lambda: engine.stats().running == 3)
            engine.step_seconds = 0.01
            assert await service.drain(0.6) == 2
            await asyncio.gather(*(each.task for each in (short, *long)))
            assert short.status == 200
            assert [each.status for each in long] == [503, 200]
            assert all(b"the server shut down before" in b"".join(each.parts) for each in long)
            late = Client(application, COMPLETIONS, LONG)
            await late.task
            assert late.status == 503
            assert cancelled(service, "drained") == 2

    asyncio.run(run())


def test_the_queue_of_prompts_to_score_is_bounded():
    async def run():
        async with serving(limits=ServingLimits(scoring=3)) as (_, application), client(application) as http:
            body = {"prompt": ["a", "b", "c"], "echo": True, "logprobs": 1, "max_tokens": 0}
            assert (await http.post(COMPLETIONS, json=body)).status_code == 200
            body["prompt"].append("d")
            assert (await http.post(COMPLETIONS, json=body)).status_code == 429

    asyncio.run(run())
