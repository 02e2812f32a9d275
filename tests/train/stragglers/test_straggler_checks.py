"""What processes contribute to a comparison, and the events of processes and devices that are slow."""

import types

import numpy as np
import pytest
from section_visits import Clock
from small_runs import small_values

from zaya_jax.config import Config
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.events import events_of
from zaya_jax.run_folder.names import CAUGHT_UP, STRAGGLING
from zaya_jax.run_folder.stragglers import active_stragglers
from zaya_jax.train.heartbeats import DISPATCH, READ, SAVE, STEP, Heartbeats
from zaya_jax.train.hooks.checkpointing import Checkpointing
from zaya_jax.train.hooks.hook import StepContext
from zaya_jax.train.stragglers import straggler_checks
from zaya_jax.train.stragglers.straggler_checks import DEVICE, LOOP, StragglerChecks

CHECKS, LOG_EVERY = 3, 2


class Run:
    """The loop of one process on a clock; the gathered values of the others are set by the test."""

    def __init__(self, tmp_path, monkeypatch):
        self.clock = Clock()
        self.own, self.others = {}, []
        self.said = []
        self.checkpoints = types.SimpleNamespace(blocking_seconds=0.0)
        values = small_values(run_folder=str(tmp_path), corpus="corpus")
        values["watch"] = {"straggler_checks": CHECKS, "straggler_every": LOG_EVERY}
        self.context = object.__new__(StepContext)
        vars(self.context).update(
            run=types.SimpleNamespace(
                config=Config.from_dict(values),
                mesh=types.SimpleNamespace(size=8, devices=np.array([])),
            ),
            heartbeats=Heartbeats(self.clock),
            clock=types.SimpleNamespace(restart=lambda step: None),
            progress=types.SimpleNamespace(say=self.said.append),
            step=0,
            range=types.SimpleNamespace(first_step=10**6),
        )
        monkeypatch.setattr(straggler_checks.time, "monotonic", self.clock)
        monkeypatch.setattr(hosts, "gather", self._gather)
        monkeypatch.setattr(hosts, "host_names", lambda: ("n0", "n1", "n2", "n3"))
        checkpointing = Checkpointing(None)
        vars(checkpointing)["checkpoints"] = self.checkpoints
        self.hook = StragglerChecks(checkpointing)
        self.hook.on_start(self.context)

    def _gather(self, name, value):
        self.own = value
        return [value, *(value | other for other in self.others)]

    def make_steps(self, count, *, read=0.1, host=0.05, call=0.2, hooks=0.02):
        """Makes steps as the training loop does; every second one is logged."""
        context, beats = self.context, self.context.heartbeats
        batches = self.hook.wrap_batches(context, iter(range(count)))
        beats.enter(READ, context.step + 1)
        for _ in range(count):
            self.clock.seconds += read
            next(batches)
            context.step += 1
            beats.enter(DISPATCH, context.step)
            self.clock.seconds += host
            self.hook.on_step_begin(context)
            self.clock.seconds += call
            self.hook.on_step(context)
            self.clock.seconds += hooks
            if context.step % LOG_EVERY == 0:
                beats.enter(STEP, context.step)
                self.clock.seconds += 0.5
                self.hook.on_check(context, False)
            self.hook.on_step_end(context)
            self.clock.seconds += 0.3  # a wait before a save
            beats.enter(SAVE, context.step)
            self.clock.seconds += 1.0
            beats.enter(READ, context.step + 1)

    @property
    def events(self):
        return events_of(self.context.config.run_folder)


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


def test_waits_for_others_do_not_count(run):
    """Neither those of a full queue, nor those for a logged step, nor those around a save."""
    run.make_steps(6)
    assert run.own[READ] == pytest.approx(LOG_EVERY * 0.1)
    assert run.own[DISPATCH] == pytest.approx(LOG_EVERY * (0.05 + 0.02))
    assert run.own[SAVE] == 0
    # With the waits before two saves: one of this interval, and the last one of the interval before.
    assert run.own[LOOP] == pytest.approx(LOG_EVERY * 0.37 + 0.5 + 2 * 0.3)


def test_a_process_is_named_with_host_and_section_until_it_has_caught_up(run):
    run.others = [{}, {DISPATCH: 1.0}, {}]
    run.make_steps(CHECKS * LOG_EVERY)
    (event,) = run.events
    assert (event["event"], event["process"], event["host"]) == (STRAGGLING, 2, "n2")
    assert (event["section"], event["device"], event["step"]) == (DISPATCH, None, CHECKS * LOG_EVERY)
    assert "process 2" in event["reason"]
    assert event["reason"] in run.said[0]
    assert active_stragglers(run.events) == [event]
    run.others = [{}, {}, {}]
    run.make_steps(2 * CHECKS * LOG_EVERY)
    assert [each["event"] for each in run.events] == [STRAGGLING, CAUGHT_UP]
    assert active_stragglers(run.events) == []


def test_slow_files_are_compared_at_saves_alone(run):
    run.others = [{SAVE: 0.2}, {SAVE: 0.2}, {SAVE: 9.0}]
    for _ in range(CHECKS):
        run.others = [{}, {}, {}]
        run.make_steps(4 * LOG_EVERY)
        run.others = [{SAVE: 0.2}, {SAVE: 0.2}, {SAVE: 9.0}]
        run.make_steps(LOG_EVERY)
    assert [(event["process"], event["section"]) for event in run.events] == [(3, SAVE)]


def test_a_device_is_named(run, monkeypatch):
    """Of four processes with two devices each, the second one of process 1."""
    run.hook.probe.devices = ["a", "b"]
    monkeypatch.setattr(run.hook.probe, "seconds", lambda: [0.010, 0.0102])
    run.others = [{DEVICE: [0.010, 0.014]}, {}, {}]
    run.make_steps(CHECKS * LOG_EVERY)
    (event,) = run.events
    assert (event["process"], event["device"], event["section"]) == (1, 1, DEVICE)
    assert event["share"] == pytest.approx(0.004 / 0.0101, rel=0.03)
    assert "device 1 of process 1" in event["reason"]


def test_compilation_is_no_slowness(run):
    run.others = [{}, {READ: 50.0}, {}]
    for _ in range(2 * CHECKS):
        run.context.range.first_step = run.context.step + LOG_EVERY - 1
        run.make_steps(LOG_EVERY)
    assert run.events == []
    assert run.own == {}
