"""The devices and processes that a program trains on, chosen before JAX starts."""

import atexit
import subprocess
import sys
from typing import Annotated, Any

import jax

from dejax.errors import FailedError, UsageError
from infer.argument_types import ParsedBy
from infer.console import be_quiet, say

HEARTBEAT_SECONDS = 10
"""How long a process may be silent before the others take it for dead."""


def _distributed(text: str) -> str:
    parts = text.split(",")
    ok = text in ("none", "auto")
    host, _, port = parts[0].rpartition(":")
    if len(parts) == 3 and all(part.isdecimal() for part in (port, *parts[1:])):
        ok = bool(host) and 0 < int(port) < 2**16 and int(parts[2]) < int(parts[1])
    if not ok:
        raise UsageError(
            f"{text!r}: expected none, auto, or HOST:PORT,COUNT,INDEX with PORT from 1 to 65535 "
            "and INDEX below COUNT"
        )
    return text


Distributed = Annotated[str, ParsedBy(_distributed, "none|auto|HOST:PORT,COUNT,INDEX")]


def use_cpu_devices(count: int) -> None:
    """Has JAX show the CPU as `count` devices; without effect once JAX has started.

    Two devices use two cores better than one: many operations run on one core of a device.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX runs already, on as many devices as it has


def start_devices(cpu_devices: int, distributed: str) -> None:
    """`use_cpu_devices`, and this process joined to the others of its run, if there are any.

    Args:
      distributed: `none`; `auto`, where JAX finds the others by itself (SLURM, Kubernetes, TPU
      pods, MPI); or HOST:PORT,COUNT,INDEX: the first process's address, how many there are, and
      which this one is.

    Raises:
      FailedError: JAX finds no others, or they do not come.
    """
    use_cpu_devices(cpu_devices)
    if distributed == "none":
        return
    where: dict[str, Any] = {}
    if distributed != "auto":
        address, count, index = distributed.split(",")
        where = dict(coordinator_address=address, num_processes=int(count), process_id=int(index))
        say(f"process {index} of {count}: waiting for the others at {address}")
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, **where)
    except (RuntimeError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise FailedError(f"--distributed {distributed}: {first_line}") from None
    _leave_word(f"process {jax.process_index()} of {jax.process_count()}")
    if jax.process_index() != 0:
        be_quiet()


_LISTEN = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"


def _leave_word(who: str) -> None:
    """Has a small process say in one line what happened, should this one end without a word.

    JAX ends a process whose peers have died from within, by an abort: no handler of ours runs.
    """
    line = (
        f"dejax: error: {who} was ended, by a signal or because another process died or could not "
        "be reached; start all of them again: they go on from the newest checkpoint"
    )
    listener = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LISTEN, line],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt from the terminal is not for it
    )

    def end_well() -> None:
        listener.communicate("done")

    atexit.register(end_well)
