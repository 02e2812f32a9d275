"""What can go wrong between the processes of a run. Imports nothing, for the command line to know it."""


class Late(Exception):
    """Other processes were not where all must be, within the limit."""


class Lost(Exception):
    """Another process of the run has gone, and what its devices held with it."""


class Diverged(Exception):
    """Devices that must hold the same numbers do not; what was computed since they did is worth nothing.

    Attributes:
      hosts: those whose devices are wrong; none where that is not known.
    """

    def __init__(self, what: str, hosts: tuple[str, ...]):
        super().__init__(what)
        self.hosts = hosts


class Shared(ValueError):
    """A failure of one process that all of them raise.

    Attributes:
      what: it is; the sentence of the error may say also what to do.
      is_told_here: whether this process is to print it; one does for all.
      is_damage: whether something on the disk is not what was written there.
    """

    def __init__(self, what: str, *, is_told_here: bool, advice: str = "", is_damage: bool = False):
        super().__init__(what + advice)
        self.what, self.is_told_here, self.is_damage = what, is_told_here, is_damage
