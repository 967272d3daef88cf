"""The one training loop: steps, metrics, evaluation, checkpoints and resume.

Data position equals the step, so a checkpoint is parameters, optimizer state and step; resuming
gives the same batches and, on the same device, the same losses. A run may be resumed for longer, or
with another schedule, which is told; not with settings that would make it another run.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from dejax.errors import FailedError, UsageError
from dejax.paths import kind_of
from infer.console import progress, say

Metrics = dict[str, int | float]
StepFn = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
Resume = Literal["auto", "none"]

MOST_DEVICES = 256
"""Virtual CPU devices that a run may ask for: JAX makes them all at once, when it starts."""

_MAY_CHANGE = ("loop", "phases", "optimizer", "cpu_devices", "remat")
"""What of a configuration a resumed run may have otherwise: how long, how fast, on what."""
_MAY_NOT = ("optimizer.kind",)


@dataclass(frozen=True)
class LoopConfig:
    """How long to train and how often to speak, evaluate and save (0 = never)."""

    steps: int
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2

    def __post_init__(self):
        if self.steps < 1:
            raise UsageError(f"loop.steps is {self.steps}; expected 1 or more")
        if min(self.log_every, self.eval_every, self.save_every) < 0 or self.log_every == 0:
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


def checkpointer(workdir: Path, keep: int) -> ocp.training.Checkpointer:
    """Orbax checkpoints under `workdir`/checkpoints, the last `keep` of them."""
    kept: Any = ocp.training.preservation_policies.LatestN(keep)
    folder: Any = (workdir / "checkpoints").resolve()  # orbax's stubs ask for etils' own path type
    return ocp.training.Checkpointer(folder, preservation_policy=kept)


def check_resume(
    workdir: Path, run_info: dict[str, Any], *, resume: bool, steps: int
) -> int | None:
    """The step of the newest checkpoint in `workdir`, if this run can continue from it.

    Args:
      run_info: as given to `run`.
      resume: whether it is wanted; steps: of the whole run.

    Returns:
      None where there is no checkpoint.

    Raises:
      UsageError: there is one and resuming is not wanted, or it is another run's, or already beyond
        `steps`.
    """
    if kind_of(workdir / "checkpoints") != "folder":
        return None
    with contextlib.closing(checkpointer(workdir, 1)) as saver:
        if saver.latest is None:
            return None
        step = saver.latest.step
        saved: Any = saver.checkpointables_metadata(step).custom_metadata or {}
    if not resume:
        raise UsageError(f"{workdir}: has checkpoints; resume, or choose another folder")
    changes = list(_changes(saved, run_info))
    refused = [change for name, change in changes if not _may_change(name)]
    if refused:
        raise UsageError(
            f"{workdir}: its checkpoints are of another run ({', '.join(refused)}); "
            "choose another folder"
        )
    if step > steps:
        raise UsageError(
            f"{workdir}: its checkpoint is at step {step}, beyond loop.steps {steps}; train for "
            "longer, or choose another folder"
        )
    told = [change for name, change in changes if _may_change(name)]
    what = f"resuming from step {step} of {steps}" if step < steps else f"all {steps} steps done"
    say(f"{workdir}: {what}{'; changed: ' if told else ''}{', '.join(told)}")
    return step


def _may_change(name: str) -> bool:
    if name == "config.target":  # a folder; the target's identity is compared beside it
        return True
    setting = name.removeprefix("config.")
    return setting.split(".")[0] in _MAY_CHANGE and setting not in _MAY_NOT


def _changes(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, what it was and is) of every setting that both have and that differs.

    What only one of them has is a setting of another version of dejax, but for the free-form part
    `model`.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield name, f"{name.removeprefix('config.')} was {old}, now {new}"
        return
    names = [*new, *(old.keys() - new.keys())] if name == "model" else [*(new.keys() & old.keys())]
    for key in names:
        yield from _changes(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))


def _check_finite(metrics: Metrics, step: int) -> None:
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise FailedError(
            f"step {step}: {', '.join(bad)} is not finite; lower the learning rate, or resume from "
            "the last checkpoint with other data"
        )


def run(
    state: Any,
    *,
    step_fn: StepFn,
    batch_at: Callable[[int], Any],
    config: LoopConfig,
    label: str,
    workdir: Path | None = None,
    resume: bool = False,
    evaluate: Callable[[Any], Metrics] | None = None,
    run_info: dict[str, Any] | None = None,
    place: Callable[[Any], Any] = jax.device_put,
) -> tuple[Any, list[Metrics]]:
    """Trains to `config.steps` and returns the final state and the metrics log.

    Args:
      state: pytree with the trained parameters and the optimizer state (donated to each step).
      step_fn: jitted (state, batch) -> (state, metrics).
      batch_at: step (from 0) -> batch of host arrays, its `tokens` counted for the rate.
      label: what the progress line calls the run.
      workdir: where metrics.jsonl and checkpoints go; None keeps everything in memory.
      resume: continue from the newest checkpoint in `workdir`, if there is one.
      place: puts a batch on the devices.
      run_info: what the checkpoints say about the run (its resolved configuration).

    Raises:
      FailedError: a metric is not finite.
    """
    first, log = 0, []
    saver = None if workdir is None else checkpointer(workdir, config.keep)
    if saver is not None and resume and saver.latest is not None:
        first = saver.latest.step
        state = saver.load(first, state)
    started, tokens = time.perf_counter(), 0
    with progress(label, config.steps, "steps", done=first) as bar:
        for step in range(first + 1, config.steps + 1):
            batch = batch_at(step - 1)
            compiles = step == first + 1
            with bar.aside("compiling", 1) if compiles else contextlib.nullcontext():
                state, metrics = step_fn(state, place(batch))
                jax.block_until_ready(metrics)  # the rate shown is that of finished steps
            tokens += batch["tokens"].size
            last = step == config.steps
            shown = {}
            if step % config.log_every == 0 or last:
                row = {name: float(value) for name, value in jax.device_get(metrics).items()}
                _check_finite(row, step)
                elapsed = time.perf_counter() - started
                shown = {"loss": row["loss"], "tokens/s": tokens / elapsed}
                row |= {"step": step, "tokens_per_second": tokens / elapsed}
                if evaluate and _due(config.eval_every, step, last):
                    row |= evaluate(state)
                log.append(row)
                if workdir is not None:
                    with (workdir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                started, tokens = time.perf_counter(), 0
            if saver is not None and _due(config.save_every, step, last):
                saver.save(step, state, custom_metadata=run_info, overwrite=True)
            bar.advance(1, **shown)
    if saver is not None:
        saver.close()
    return state, log


def _due(every: int, step: int, last: bool) -> bool:
    """Whether something done every `every` steps (0 = never) is due at this step."""
    return every > 0 and (last or step % every == 0)
