"""The two ways a dejax program ends early: the input was wrong, or the work failed.

A message is one line: what was wrong, where, what was expected, what to do. `dejax.cli` prints it
without a traceback and exits with the status named here.
"""


class UsageError(ValueError):
    """The call or its input was wrong (exit status 2)."""

    exit_status = 2


class FailedError(RuntimeError):
    """The input was fine and the work failed all the same (exit status 1)."""

    exit_status = 1
