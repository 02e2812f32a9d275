"""The hook that copies a run's state to the memory of its nodes while it trains."""

import shutil

from zaya_jax.parallel.processes import hosts
from zaya_jax.train.consistency.provenance import corpora_in_order
from zaya_jax.train.heartbeats import SAVE
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.hooks.rollback import Rollback
from zaya_jax.train.peer_copies.host_state import copy_layout, own_parts
from zaya_jax.train.peer_copies.identity import copies_folder, facts_of, run_identity
from zaya_jax.train.peer_copies.writer import CopyWriter
from zaya_jax.train.stop_request import Stopped


class PeerCopying(Hook):
    """Copies the state every `train.peer_copies_every` steps, and sends it to a process of the next node.

    Only the copy from the devices delays training. The rest runs in a thread; a step that is due before it is
    done is not copied. A copy that fails is reported, and never ends the run.
    """

    _writer: CopyWriter | None = None

    def on_start(self, context: StepContext) -> None:
        """Prepares the folders of all nodes, and removes copies that no restart may use any more."""
        run, config = context.run, context.config
        if config.train.peer_copies_every is None:
            return
        identity = run_identity(config.run_folder, create=True)
        assert identity is not None, "it was created"
        layout = copy_layout(config, run.mesh, run.extensions)
        restored = None if run.copy is None else run.copy.header
        self._writer = CopyWriter(
            hosts.run_on_all("peer copies folder", lambda: copies_folder(config, identity.place)),
            num_bytes=layout.num_bytes,
            facts=facts_of(config, identity.run, layout.fingerprint, run.skipped_ranges),
            corpora=corpora_in_order(config, run.provenance.corpora),
            restored=None if restored is None else (restored.step, restored.attempt),
        )
        if self._writer.neighbor is None:
            context.progress.say("all processes are on one node: peer copies do not survive its loss")

    def on_step_done(self, context: StepContext) -> None:
        """Copies the state when that is due, and no copy is still being written."""
        every, step = context.config.train.peer_copies_every, context.step
        # The last state of a run is in its checkpoint.
        if self._writer is None or every is None or step % every or step == context.config.train.num_steps:
            return
        context.heartbeats.enter(SAVE, step)
        is_ready, problem = self._writer.poll()
        if problem is not None:
            context.progress.say(f"step {step}: {problem}")
        if is_ready:
            # As before a checkpoint: a state that fails a check is not kept, and its metrics are on the disk.
            context.emit(Hook.on_check, True)
            context.emit(Hook.on_save)
            self._writer.write(step, own_parts(context.state))
        context.clock.restart(step)

    def on_end(self, context: StepContext, error: BaseException | None) -> None:
        """Waits for the copies that are being written."""
        # After other errors processes may be gone.
        if self._writer is not None and (error is None or isinstance(error, Stopped | Rollback)):
            self._writer.close()

    def on_exit(self, error: BaseException | None) -> None:
        """Frees the memory of a run that has ended with a checkpoint."""
        if self._writer is not None and (error is None or isinstance(error, Stopped)):
            # Other processes of the node may be removing it, too.
            shutil.rmtree(self._writer.folder, ignore_errors=True)
