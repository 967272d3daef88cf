"""The one training loop: steps, metrics, evaluation, checkpoints and resume.

Data position equals the step, so a checkpoint is parameters, optimizer state and step; resuming
gives the same batches and, on the same device, the same losses. A run may be resumed for longer, or
with another schedule, which is told; not with settings that would make it another run.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from dejax.errors import FailedError, UsageError
from infer.console import progress
from train.checkpoints import Saver
from train.documents import read_ahead
from train.metrics import Metrics, MetricsFile
from train.preemption import watch_for_stop

StepFn = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
Resume = Literal["auto", "none"]

MOST_DEVICES = 256
"""Virtual CPU devices that a run may ask for: JAX makes them all at once, when it starts."""


@dataclass(frozen=True)
class LoopConfig:
    """How long to train and how often to speak, evaluate and save (0 = never).

    Attributes:
      norms_every: each loss by itself, for the norm of its gradient; simulate_every: the rounds of
      decoding held-out prompts, without a cache; decode_every: real decoding of them. All that is
      measured needs a logged step.
    """

    steps: int
    log_every: int = 10
    eval_every: int = 0
    norms_every: int = 0
    simulate_every: int = 0
    decode_every: int = 0
    save_every: int = 0
    keep: int = 2

    def __post_init__(self):
        if self.steps < 1:
            raise UsageError(f"loop.steps is {self.steps}; expected 1 or more")
        measured = (self.eval_every, self.norms_every, self.simulate_every, self.decode_every)
        if min(self.save_every, *measured) < 0 or self.log_every < 1:
            raise UsageError("loop: intervals must be 0 or more, and log_every at least 1")
        if self.keep < 1:
            raise UsageError(f"loop.keep is {self.keep}; expected 1 or more")


def check_seed_and_devices(seed: int, cpu_devices: int) -> None:
    """Refuses what no run can have: a seed beyond 32 bits, or less than one device.

    Raises:
      UsageError: so.
    """
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed is {seed}; expected 0 to {2**32 - 1}")
    if not 1 <= cpu_devices <= MOST_DEVICES:
        raise UsageError(f"cpu_devices is {cpu_devices}; expected 1 to {MOST_DEVICES}")


@dataclass(frozen=True)
class Measure:
    """Something measured on the way, every so many steps (0 = never) and at the end.

    Attributes:
      of: state -> metrics, called by all processes.
    """

    every: int
    of: Callable[[Any], Metrics]


def run(
    state: Any,
    *,
    step_fn: StepFn,
    batch_at: Callable[[int], Any],
    place: Callable[[Any], Any] = jax.device_put,
    config: LoopConfig,
    label: str,
    workdir: Path | None = None,
    resume: bool = False,
    measures: Sequence[Measure] = (),
    run_info: dict[str, Any] | None = None,
    tokens_per_step: Callable[[Any], int] = lambda batch: batch["tokens"].size,
    rates: Callable[[float], Metrics] = lambda tokens_per_second: {},
) -> tuple[Any, list[Metrics]]:
    """Trains to `config.steps` and returns the final state and the metrics log.

    Every process of a run calls this with the same arguments; the first one speaks and writes.

    Args:
      state: pytree with the trained parameters and the optimizer state (donated to each step).
      step_fn: jitted (state, batch) -> (state, metrics).
      batch_at: step (from 0) -> batch of host arrays; place: puts it on the devices.
      label: what the progress line calls the run.
      workdir: where metrics, TensorBoard's files and checkpoints go; None keeps all in memory.
      resume: continue from the newest checkpoint in `workdir`, if there is one.
      run_info: what the checkpoints say about the run (its resolved configuration).
      tokens_per_step: tokens of a batch, for the rate; rates: what else follows from that rate.

    Raises:
      FailedError: a metric is not finite, or the run was told to stop (its checkpoint is saved).
    """
    first, log, clock = 0, [], _Clock()
    saver = None if workdir is None else Saver(workdir, config.keep, run_info)
    if saver is not None and resume:
        first, state = saver.newest(state)
    with contextlib.ExitStack() as stack:
        if saver is not None:
            stack.callback(saver.close)
        stop_after = stack.enter_context(watch_for_stop())
        written = stack.enter_context(MetricsFile(workdir, first=first))
        bar = stack.enter_context(progress(label, config.steps, "steps", done=first))
        batches = read_ahead(batch_at, range(first, config.steps))
        stack.callback(batches.close)
        for step in range(first + 1, config.steps + 1):
            last, shown = step == config.steps, {}
            with clock.of("data"):
                batch = next(batches)
                placed = place(batch)
            compiles = step == first + 1
            with bar.aside("compiling", 1) if compiles else contextlib.nullcontext():
                with clock.of("compile" if compiles else "step"):
                    state, metrics = step_fn(state, placed)
                    jax.block_until_ready(metrics)  # the rate shown is that of finished steps
            clock.tokens += 0 if compiles else tokens_per_step(batch)
            stopping = stop_after(step)
            logged = step % config.log_every == 0 or last
            saves = saver is not None and (stopping or _due(config.save_every, step, last))
            if logged or saves:
                row: Metrics = {name: float(v) for name, v in jax.device_get(metrics).items()}
                _check_finite(row, step, saver)
            if logged:
                shown = {"loss": row["loss"]}
                with clock.of("evaluation"):
                    for measure in measures:
                        row |= measure.of(state) if _due(measure.every, step, last) else {}
            if saves:
                assert saver is not None
                with clock.of("saving"):
                    saver.save(step, state)
            if logged:
                rate = clock.tokens / clock.seconds["step"] if clock.tokens else 0.0
                shown |= {"tokens/s": rate} if rate else {}
                row |= {"step": step} | clock.metrics() | (rates(rate) if rate else {})
                log.append(row)
                written.write(row)
                clock = _Clock()
            bar.advance(1, **shown)
            if stopping and not last:
                saved = "its checkpoint is saved: the same command goes on from there"
                raise FailedError(
                    f"{label}: told to stop, after step {step} of {config.steps}; "
                    + (saved if saver else "nothing is saved")
                )
    return state, log


class _Clock:
    """Where the time since the last row of metrics went, in seconds."""

    def __init__(self):
        uses = ("data", "compile", "step", "evaluation", "saving")
        self.seconds: dict[str, float] = dict.fromkeys(uses, 0.0)
        self.tokens = 0

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Books the time within under `what`."""
        began = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Seconds by use, and the rate of finished steps (compilation left out)."""
        rate = self.tokens / self.seconds["step"] if self.tokens else 0.0
        spent = {f"seconds_{name}": value for name, value in self.seconds.items()}
        return {"tokens_per_second": rate} | spent


def _check_finite(metrics: Metrics, step: int, saver: Saver | None) -> None:
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        good = "none" if saver is None or saver.last_good is None else saver.last_good
        raise FailedError(
            f"step {step}: {', '.join(bad)} is not finite (last good checkpoint: {good}); lower "
            "the learning rate, or resume from there with other data"
        )


def _due(every: int, step: int, last: bool) -> bool:
    """Whether something done every `every` steps (0 = never) is due at this step."""
    return every > 0 and (last or step % every == 0)
