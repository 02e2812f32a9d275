"""The error for arguments that an operation does not accept. Imports nothing."""


class ArgumentError(ValueError):
    """An argument has a shape, a type or a value that the operation does not support.

    Attributes:
      exit_code: exit code of a command whose settings lead to this error, as for other mistakes of a user.
    """

    exit_code = 2
