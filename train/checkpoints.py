"""Checkpoints of a run: written in the background, whole or not at all, and resumed from.

A checkpoint is parameters, optimizer state and step, and beside them what the run is: a resumed run
may be longer, or have another schedule, which is told; not settings that would make it another run.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from dejax.errors import FailedError, UsageError
from dejax.paths import kind_of
from infer.console import say

_MAY_CHANGE = (
    "loop",
    "phases",
    "optimizer",
    "cpu_devices",
    "mesh",
    "remat",
    "split_draft",
    "eval_rows",
)
"""What of a configuration a resumed run may have otherwise: how long, how fast, on what."""
_MAY_NOT = ("optimizer.kind",)


def checkpointer(workdir: Path, keep: int) -> ocp.training.Checkpointer:
    """Orbax checkpoints under `workdir`/checkpoints, the last `keep` of them."""
    kept: Any = ocp.training.preservation_policies.LatestN(keep)
    folder: Any = (workdir / "checkpoints").resolve()  # orbax's stubs ask for etils' own path type
    return ocp.training.Checkpointer(folder, preservation_policy=kept)


def _set_aside(folder: Path) -> None:
    """Takes out of the way what orbax would take for the newest checkpoint, and what it left.

    A checkpoint is whole once it says so and can be read; a killed save leaves a temporary folder.
    """
    if jax.process_index() == 0:
        for path in sorted(folder.iterdir()):
            if path.name.endswith(_UNFINISHED):
                shutil.rmtree(path)
            elif path.name.isdecimal() and not _is_whole(path):
                aside = path.with_name(path.name + ".damaged")
                say(f"{path}: is no whole checkpoint; it is left out, and called {aside.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
    if jax.process_count() > 1:  # before any of them looks for the newest one
        multihost_utils.sync_global_devices("checkpoints set aside")


_UNFINISHED, _FINISHED = ".orbax-checkpoint-tmp", "commit_success.txt"


def _is_whole(path: Path) -> bool:
    try:
        json.loads((path / "_CHECKPOINT_METADATA").read_bytes())
    except (OSError, ValueError):
        return False
    return (path / _FINISHED).is_file()


@contextlib.contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """One line, where a checkpoint cannot be read: orbax has an error for every way to be damaged.

    Raises:
      FailedError: so.
    """
    try:
        yield
    except (FailedError, UsageError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0][:120]
        raise FailedError(
            f"{path}: cannot be read ({why}); move it away, and the same command goes on from the "
            "checkpoint before it"
        ) from None


def check_resume(
    workdir: Path, run_info: dict[str, Any], *, resume: bool, steps: int, tell: bool = True
) -> int | None:
    """The step of the newest checkpoint in `workdir`, if this run can continue from it.

    Args:
      run_info: as given to `run`.
      resume: whether it is wanted; steps: of the whole run; tell: say from where the run goes on.

    Returns:
      None where there is no checkpoint.

    Raises:
      UsageError: there is one and resuming is not wanted, or it is another run's, or already beyond
        `steps`.
    """
    folder = workdir / "checkpoints"
    if (kind := kind_of(folder)) is None:
        return None
    if kind != "folder":
        raise UsageError(f"{folder}: is no folder; a run keeps its checkpoints there: move it away")
    _set_aside(folder)
    with contextlib.closing(checkpointer(workdir, 1)) as saver:
        if saver.latest is None:
            return None
        step = saver.latest.step
        with _damage_told(folder / str(step)):
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
    if tell:
        say(f"{workdir}: {what}{'; changed: ' if told else ''}{', '.join(told)}")
    return step


def _may_change(name: str) -> bool:
    if name in ("config.target", "config.dense"):  # paths; identities are compared beside them
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


@jax.jit
def _copied(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


class Saver:
    """Checkpoints of a run: written in the background, the last `keep` of them kept."""

    def __init__(self, workdir: Path, keep: int, info: dict[str, Any] | None):
        self._orbax, self._info = checkpointer(workdir, keep), info
        self._folder = workdir / "checkpoints"
        self.last_good: int | None = None
        self._saved: int | None = None  # surely on disk

    def newest(self, state: Any) -> tuple[int, Any]:
        """Step and state of the newest whole checkpoint, laid out as `state`; (0, state) if none.

        The arrays go where those of `state` lie, whatever mesh they were saved from.
        """
        if self._orbax.latest is None:
            return 0, state
        self.last_good = self._saved = self._orbax.latest.step
        with _damage_told(self._folder / str(self.last_good)):
            return self.last_good, self._orbax.load(self.last_good, state)

    def save(self, step: int, state: Any) -> None:
        """Begins to save; the state may be donated to the next step at once.

        Waits for the save before it: orbax leaves out one that finds another under way.
        """
        copied, info = _copied(state), self._info
        with self._failure_told():
            self._orbax.wait()
            self._orbax.save_async(step, copied, custom_metadata=info, overwrite=True, force=True)
        self.last_good, self._saved = step, self.last_good

    def close(self) -> None:
        """Waits until what was begun is on disk."""
        with self._failure_told():
            self._orbax.close()

    @contextlib.contextmanager
    def _failure_told(self) -> Iterator[None]:
        """One line, where the disk is full or fails: what was begun before is told here too."""
        try:
            yield
        except Exception as error:
            words = f"{error} {error.__cause__ or ''}"
            if not isinstance(error, OSError) and "space left" not in words:
                raise
            full = "space left" in words
            why = "no space left on device" if full else f"{error}".split("\n")[0][:120]
            raise FailedError(
                f"{self._folder}: a checkpoint cannot be written ({why}); last good checkpoint: "
                f"{'none' if self._saved is None else self._saved}"
            ) from None
