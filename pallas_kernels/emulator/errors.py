"""The error that every check of the emulator raises."""


class EmulationError(Exception):
    """A kernel did what the hardware would not do reliably, or what the emulator does not know.

    Attributes:
      check: name of the check: "wait", "bounds", "alignment", "read-only", "uninitialized memory",
        "workgroup race", "local bounds", "local race", "barrier", "exec", "limit" or "instruction".
      pc: address of the instruction in the code object; None before one is executed.
      text: the instruction.
    """

    def __init__(self, check: str, message: str, *, pc: int | None = None, text: str = ""):
        self.check, self.message, self.pc, self.text = check, message, pc, text
        place = "" if pc is None else f"{pc:#x}: {text}: "
        super().__init__(f"{place}{message} ({check})")

    def at(self, pc: int, text: str) -> "EmulationError":
        """Returns the same error with the instruction that caused it."""
        return EmulationError(self.check, self.message, pc=pc, text=text)


def unknown(what: str) -> EmulationError:
    """Returns the error for an instruction, or a form of one, that the emulator does not implement."""
    return EmulationError("instruction", f"the emulator does not know {what}")
