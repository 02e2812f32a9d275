"""What the doctor finds: a sentence on each thing, and what follows for each use of a machine."""

import dataclasses
from collections.abc import Sequence

GOOD, WORSE, UNTESTED, BAD = "good", "worse", "untested", "bad"
STATES = (GOOD, WORSE, UNTESTED, BAD)
"""From the best on: as it should be; works, but less well; cannot be said; stands in the way."""
SMALL, NODE, CLUSTER = "small", "node", "cluster"
USES = {
    SMALL: "train a small model on the CPU",
    NODE: "train on the GPUs of this node",
    CLUSTER: "train on several such nodes",
}
"""What a machine may be for. What is in the way of a later one need not be in that of an earlier."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      name: of the thing.
      state: one of `STATES`.
      found: what is there, without a full stop.
      wanted: what should be.
      action: what to do about it; empty where it is good.
      uses: of `USES`, those for which it counts.
    """

    name: str
    state: str
    found: str
    wanted: str
    action: str
    uses: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What was found, what was wanted, and what to do."""
        ends = f"; {self.action}" if self.action else ""
        return f"{self.name}: {self.found}; wanted: {self.wanted}{ends}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether hosts serve a use.

    Attributes:
      use: of `USES`.
      state: the worst of what counts for it.
      reasons: names of the things that are not good.
    """

    use: str
    state: str
    reasons: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For whom asks whether a machine will do."""
        reasons = ", ".join(self.reasons)
        said = {
            GOOD: "fine",
            WORSE: f"works, less well than it could: {reasons}",
            UNTESTED: f"perhaps: {reasons} could not be tested, or are not as they should be",
            BAD: f"not yet: {reasons}",
        }
        return f"{USES[self.use]}: {said[self.state]}"


def judge(findings: Sequence[Finding]) -> list[Verdict]:
    """Whether hosts serve each use, from what was found on all of them."""
    verdicts = []
    for use in USES:
        count = [each for each in findings if use in each.uses and each.state != GOOD]
        worst = max((each.state for each in count), key=STATES.index, default=GOOD)
        # What is in the way is named alone: beside it, what could be better is of no interest yet.
        blamed = [each for each in count if worst != BAD or each.state == BAD]
        verdicts.append(
            Verdict(use=use, state=worst, reasons=tuple(dict.fromkeys(each.name for each in blamed)))
        )
    return verdicts
