"""A clock that tests advance, and visits to sections of the training loop."""

from zaya_jax.train.heartbeats import READ, Heartbeats


class Clock:
    """A clock that tests advance."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def visit(heartbeats: Heartbeats, clock: Clock, section: str, durations: list[float]) -> None:
    """Visits a section several times, and then the next one."""
    for seconds in durations:
        heartbeats.enter(section, 1)
        clock.seconds += seconds
    heartbeats.enter(READ, 2)
