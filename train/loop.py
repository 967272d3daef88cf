"""The one training loop: steps, metrics, evaluation, checkpoints and resume.

Data position equals the step, so a checkpoint is parameters, optimizer state and step; resuming
gives the same batches and, on the same device, the same losses.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from dejax.errors import FailedError, UsageError
from infer.console import progress

Metrics = dict[str, int | float]
StepFn = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


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


def checkpointer(workdir: Path, keep: int) -> ocp.training.Checkpointer:
    """Orbax checkpoints under `workdir`/checkpoints, the last `keep` of them."""
    kept: Any = ocp.training.preservation_policies.LatestN(keep)
    folder: Any = (workdir / "checkpoints").resolve()  # orbax's stubs ask for etils' own path type
    return ocp.training.Checkpointer(folder, preservation_policy=kept)


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
    with progress(label, config.steps - first, "steps") as bar:
        for step in range(first + 1, config.steps + 1):
            batch = batch_at(step - 1)
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
