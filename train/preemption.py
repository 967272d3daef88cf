"""Told to stop: a run that gets SIGTERM saves where it is, on all its processes at one step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

Stopping = Callable[[int], bool]
"""Step -> whether to save after it and leave; asked after every step, by all processes."""


@contextlib.contextmanager
def watch_for_stop() -> Iterator[Stopping]:
    """A function that tells, after each step, whether the run has been asked to stop.

    Of several processes JAX's coordinator chooses the step, the same one for all. A process by
    itself listens for SIGTERM here (in the main thread only; elsewhere nobody asks).
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda step: asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
