"""The hook that reads the comparisons of checksums which the compiled step makes."""

from zaya_jax.train.heartbeats import COMPILE
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.integrity.findings import (
    differing_columns,
    end_corrupted_run,
    gather_findings,
    local_rows,
)
from zaya_jax.train.integrity.step_replay import repeat_last_step
from zaya_jax.train.step.integrity import Integrity, names_of


class IntegrityChecks(Hook):
    """Ends a run in which a checksum does not match; the step with the mismatch has not been applied.

    Failures stay in the state, so that reading the newest step at each check is enough.
    """

    def on_check(self, context: StepContext, before_save: bool) -> None:
        """Reads the failed comparisons; before a save it also compares the state that is about to be saved.

        Raises:
          Diverged: naming the device, the process and the tensor.
        """
        integrity, mismatches = context.state.integrity, context.metrics.mismatches
        if integrity is None or mismatches is None:
            return
        # The same number in all processes, so that all read the details, or none.
        if int(mismatches):
            self._end(context, integrity)
        if before_save:
            self._compare_at_rest(context, integrity)

    def _end(self, context: StepContext, integrity: Integrity) -> None:
        names = _failed_names(context)
        # Each process reads its own devices; a collective between devices is part of what is in doubt.
        own = [
            (int(step), device, names[column])
            for device, row in local_rows(integrity.failed_DF).items()
            for column, step in enumerate(row)
            if step
        ]
        findings = gather_findings("corruption", own)
        # Only recorded: equal results mean that the damage is in memory, and others that it has passed.
        repeat_last_step(context, "a checksum does not match")
        end_corrupted_run(context, findings, "values differ from their checksums")

    def _compare_at_rest(self, context: StepContext, integrity: Integrity) -> None:
        # The first comparison compiles its program.
        context.heartbeats.enter(COMPILE, context.step)
        now_DK = context.programs.state_checksums(context.state)
        own = differing_columns(now_DK, integrity.state_DK, _failed_names(context), step=context.step)
        if findings := gather_findings("state at rest", own):
            end_corrupted_run(context, findings, "values changed after the update")


def _failed_names(context: StepContext) -> tuple[str, ...]:
    return names_of(context.state, has_gradients=context.config.watch.replay).failed
