"""Where the time of a compiled step goes, by kind of operation, from JAX's own profiler.

Times are summed over the threads that compute; an operation that contains others (a loop) counts
only what is not in them.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from dejax.errors import FailedError

KINDS: tuple[tuple[str, str], ...] = (
    ("products of routed experts", r"experts_of_tokens.*dot_general|ragged_dot"),
    ("rows to their experts and back", r"experts_of_tokens"),
    ("other products", r"dot_general"),
    ("choosing: top-k, sorting, largest logit", r"top_k|sort|_best"),
    ("slices and copies of loops", r"dynamic_slice|dynamic_update|dynamic_index|copy"),
)
"""Kinds of operations, the first whose pattern is in an operation's name; the rest is element by
element: norms, activations, softmax, losses, sums, the optimizer."""
REST = "element by element, and unnamed copies"
_NAMED = re.compile(r"%?([\w.\-]+) = [^\n]*?metadata=\{[^}]*op_name=\"([^\"]*)\"")
_ANY = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ", re.MULTILINE)


def kind_of(operation: str) -> str:
    """The kind of an operation, by the name that JAX gave it."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, operation)), REST)


def own_times(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Time by name of one thread's (name, start, duration), without what lies inside of it."""
    total: dict[str, float] = defaultdict(float)
    open_until: list[tuple[float, str]] = []
    for name, start, duration in sorted(events, key=lambda e: (e[1], -e[2])):
        while open_until and open_until[-1][0] <= start:
            open_until.pop()
        if open_until:
            total[open_until[-1][1]] -= duration
        total[name] += duration
        open_until.append((start + duration, name))
    return total


def profile(run: Callable[[], Any], compiled: str) -> list[dict[str, Any]]:
    """Seconds and share of every kind of operation in one call of `run`, most first.

    Args:
      run: calls the step, which has been called before; returns what to wait for.
      compiled: the text of its compiled program, which names its operations.

    Raises:
      FailedError: the profiler saw none of them.
    """
    operations = dict.fromkeys(_ANY.findall(compiled), "") | dict(_NAMED.findall(compiled))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        files = sorted(Path(folder).glob("**/*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[-1])) if files else None
    kinds: dict[str, float] = defaultdict(float)
    for plane in data.planes if data else ():
        for line in plane.lines:
            seen = [
                (event.name, event.start_ns, event.duration_ns)
                for event in line.events
                if event.name in operations
            ]
            for name, spent in own_times(seen).items():
                kinds[kind_of(operations[name])] += spent
    total = sum(kinds.values())
    if not total:
        raise FailedError("the profiler saw no operation of the step; is it run on this backend?")
    return [
        {"kind": kind, "seconds": spent / 1e9, "share": spent / total}
        for kind, spent in sorted(kinds.items(), key=lambda item: -item[1])
    ]
