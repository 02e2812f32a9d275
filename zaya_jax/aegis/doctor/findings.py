"""Results of checks, and verdicts on what a machine can be used for."""

import dataclasses
from collections.abc import Sequence

GOOD, WORSE, UNTESTED, BAD = "good", "worse", "untested", "bad"
STATES = (GOOD, WORSE, UNTESTED, BAD)
"""States from best to worst: as expected; works, but slower than possible; unknown; prevents a use."""
SMALL, NODE, CLUSTER = "small", "node", "cluster"
USES = {
    SMALL: "train a small model on the CPU",
    NODE: "train on the GPUs of this node",
    CLUSTER: "train on several such nodes",
}
"""Uses of a machine, each more demanding than the previous one."""
EVERY_USE = SMALL, NODE, CLUSTER
ON_GPUS = NODE, CLUSTER


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
      name: name of what was checked.
      uses: keys of `USES` for which it matters.
      wanted: expected value, as text.
      found: actual value, as text.
      state: one of `STATES`.
      action: what to do about it; "" if the state is good.
    """

    name: str
    uses: tuple[str, ...]
    wanted: str
    found: str
    state: str = GOOD
    action: str = ""

    @property
    def sentence(self) -> str:
        """Actual value, expected value and action as one sentence."""
        ends = f"; {self.action}" if self.action else ""
        return f"{self.name}: {self.found}; wanted: {self.wanted}{ends}"


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a check expects of a host; its methods return the finding for what the check found.

    Attributes:
      name: name of what is checked.
      uses: keys of `USES` for which it matters.
      wanted: expected value, as text.
    """

    name: str
    uses: tuple[str, ...]
    wanted: str

    def good(self, found: str) -> Finding:
        """Returns that the value is as expected."""
        return self._finding(found, GOOD)

    def worse(self, found: str, action: str, uses: tuple[str, ...] | None = None) -> Finding:
        """Returns that these uses, by default all of them, work but slower than possible."""
        return self._finding(found, WORSE, action, uses)

    def untested(self, found: str, action: str) -> Finding:
        """Returns that the value is unknown."""
        return self._finding(found, UNTESTED, action)

    def bad(self, found: str, action: str, uses: tuple[str, ...] | None = None) -> Finding:
        """Returns that the value prevents these uses, by default all of them."""
        return self._finding(found, BAD, action, uses)

    def _finding(
        self, found: str, state: str, action: str = "", uses: tuple[str, ...] | None = None
    ) -> Finding:
        return Finding(self.name, uses or self.uses, self.wanted, found, state, action)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether hosts can be used for something.

    Attributes:
      use: key of `USES`.
      state: worst state of the findings that matter for it.
      reasons: names of the findings that are not good.
    """

    use: str
    state: str
    reasons: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The verdict as one sentence."""
        reasons = ", ".join(self.reasons)
        texts = {
            GOOD: "fine",
            WORSE: f"works, but slower than possible: {reasons}",
            UNTESTED: f"unknown: {reasons} could not be tested, or should be improved",
            BAD: f"not yet: {reasons}",
        }
        return f"{USES[self.use]}: {texts[self.state]}"


def judge(findings: Sequence[Finding]) -> list[Verdict]:
    """Returns the verdict on each use, from the findings on all hosts."""
    verdicts = []
    for use in USES:
        relevant = [each for each in findings if use in each.uses and each.state != GOOD]
        # The order of the states is that of their severity.
        worst = max((each.state for each in relevant), key=STATES.index, default=GOOD)
        # If something prevents a use, findings that only slow it down are omitted.
        causes = [each for each in relevant if worst != BAD or each.state == BAD]
        verdicts.append(
            Verdict(use=use, state=worst, reasons=tuple(dict.fromkeys(each.name for each in causes)))
        )
    return verdicts
