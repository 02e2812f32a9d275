"""What a run does about its own numbers: ends, tells, or goes back to where they were good."""

import dataclasses

from zaya_jax.aegis.journal import SPIKED, STARVED
from zaya_jax.aegis.numbers import Spike, Starved
from zaya_jax.checkpoint import SavedStep, all_steps, newest_step, remove_step
from zaya_jax.parallel import hosts
from zaya_jax.train.opening import VERIFY_SECONDS, OpenRun
from zaya_jax.train.passed_over import write_passed_over
from zaya_jax.train.progress import ProgressLine
from zaya_jax.train.skips import Streak
from zaya_jax.train.watching import Watch


class GoingBack(Exception):
    """The run goes on from an older state. Raised by all processes at the same step.

    Attributes:
      spike: because of which.
      step: of the newest checkpoint before it; None where the run had none yet.
    """

    def __init__(self, spike: Spike, step: int | None):
        super().__init__(str(spike))
        self.spike, self.step = spike, step


def end_for_skips(run: OpenRun, streak: Streak, *, newest: int | None) -> None:
    """Ends a run that learns nothing any more.

    Raises:
      ValueError: always.
    """
    raise hosts.shared(streak.describe(run.config.run_folder, newest_step=newest))


def tell_starved(starved: list[Starved], step: int, progress: ProgressLine, watch: Watch) -> None:
    """Says and writes down which experts learn nothing, or everything."""
    for each in starved:
        watch.note(STARVED, step, reason=str(each), layer=each.layer, expert=each.expert, share=each.share)
        progress.say(f"step {step}: {each} for many lines in a row")


def answer_spike(run: OpenRun, spike: Spike, progress: ProgressLine, watch: Watch) -> None:
    """Goes back to before a spike, or tells of it where the run is to go on, or cannot go back.

    Raises:
      GoingBack: to the newest checkpoint before it.
      ValueError: for one more than a run may have.
    """
    config = run.config.watch
    if config.on_spike == "tell":
        return _tell_of(spike, "going on, as watch.on_spike says", progress, watch)
    if len(run.passed_over.ranges) >= config.most_spikes:
        raise hosts.shared(
            f"{spike}; the run went back for {len(run.passed_over.ranges)} before, and watch.most_spikes is "
            f"{config.most_spikes}: try a smaller optimizer.learning_rate with --change-course, or look at "
            "what the batches of these steps hold"
        )
    way = hosts.first_does("way back", lambda: _find_way(run, spike), limit_seconds=VERIFY_SECONDS)
    is_there, step = hosts.from_first("way back", way)
    if not is_there:
        return _tell_of(spike, "no checkpoint from before it is left: going on", progress, watch)
    raise GoingBack(spike, step)


def _find_way(run: OpenRun, spike: Spike) -> tuple[bool, int | None]:
    """Whether there is a way back, and the step of the checkpoint that it leads to."""
    folder = run.config.run_folder
    # Before its first checkpoint a run loses little; later, with none left, it would lose all it has learned.
    if not all_steps(folder):
        return True, None
    # To before the step whose update made the first loss what it was.
    before = [step for step in all_steps(folder) if step < _first_passed_over(spike)]
    return (True, newest_step(folder, until=max(before))) if before else (False, None)


def _first_passed_over(spike: Spike) -> int:
    return max(spike.first - 1, 1)


def _tell_of(spike: Spike, what: str, progress: ProgressLine, watch: Watch) -> None:
    watch.note(SPIKED, spike.last, reason=str(spike), first=spike.first, last=spike.last)
    progress.say(f"{spike}; {what}")


def go_back(run: OpenRun, order: GoingBack, watch: Watch) -> OpenRun:
    """The run as it goes on from before a spike, without the batches of its steps.

    What was saved since is removed: it is made again from there, where `passed_over.json` does not name its
    steps.
    """
    folder, spike = run.config.run_folder, order.spike
    # As many again behind those that were seen: what made them what they are need not end there.
    first, last = _first_passed_over(spike), spike.last + run.config.watch.spike_steps
    passed_over = run.passed_over.and_also(first, last)

    def leave() -> None:
        # First: whoever is killed on the way goes back all the same, or spikes again.
        write_passed_over(folder, passed_over)
        for step in all_steps(folder):
            if step > (order.step or 0):
                remove_step(folder, step)

    hosts.first_does("going back", leave)
    there = "the start" if order.step is None else f"checkpoint {order.step}"
    reason = f"{spike}; going back to {there}, and passing over the batches of steps {first} to {last}"
    watch.went_back(reason=reason, first=first, last=last, to=order.step or 0)
    if hosts.is_first():
        print(reason)
    # Without a checkpoint of its own the run begins where it began: at fresh weights, or another run's.
    start = run.start if order.step is None else SavedStep(folder, order.step)
    return dataclasses.replace(run, start=start, passed_over=passed_over)
