"""Where a run's metrics go: JSON lines, and TensorBoard beside them; written by one process."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import jax

from dejax.errors import FailedError
from dejax.paths import reason

Metrics = dict[str, int | float]

FILE = "metrics.jsonl"


class MetricsFile:
    """`workdir`/metrics.jsonl and TensorBoard's event files beside it.

    What a run wrote after the step that it goes on from is taken away: every step stands there
    once. In all but the first process, and without a folder, nothing is written.
    """

    def __init__(self, workdir: Path | None, *, first: int):
        self._file = None
        if workdir is None or jax.process_index() != 0:
            return
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = path = workdir / FILE
        kept = [line for line in _lines(path) if _step(line) <= first]
        partial = path.with_name(FILE + ".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")
        from tensorboardX import SummaryWriter  # its import sets an environment variable

        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=first + 1)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        for close in (self._file.close, self._board.close):
            with contextlib.nullcontext() if error is None else contextlib.suppress(OSError):
                with self._told():
                    close()

    def write(self, row: Metrics) -> None:
        """Appends one row, which has a `step`."""
        if self._file is None:
            return
        with self._told():
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in row.items():
                if name != "step":
                    self._board.add_scalar(name, value, int(row["step"]))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """One line, where the disk is full or fails."""
        try:
            yield
        except OSError as error:
            raise FailedError(f"{self._path}: cannot be written ({reason(error)})") from None


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines(True) if line.strip()]


def _step(line: str) -> int | float:
    """The step of a line; one that is none, half-written by a killed run, is beyond every step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
