"""A run on two processes: the losses of one process, and what happens when one of them ends."""

import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.train.on_devices import ROOT, environment
from tests.train.small_model import write_documents, write_model

pytestmark = pytest.mark.slow

STEPS, SAVE_EVERY = 20, 4
LONGEST = 300  # seconds that anything here may take, on a busy machine
MEASURED = ("loss", "kl", "token", "residual", "router", "grad_norm", "heldout_kl")
_DEJAX = "import sys; from dejax.cli import main; sys.exit(main())"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(condition, *processes: subprocess.Popen) -> None:
    """Waits for `condition`, while all of these processes run."""
    ends = time.monotonic() + LONGEST
    while not condition():
        assert all(process.poll() is None for process in processes), "a process has ended"
        assert time.monotonic() < ends, "it takes too long"
        time.sleep(0.02)


@dataclass(frozen=True)
class World:
    """A model and documents, a folder for what is made of them, and the processes that do."""

    folder: Path
    started: list[subprocess.Popen]

    def start(self, out: str, count: int) -> list[subprocess.Popen]:
        """`dejax distill` on eight devices, shared by `count` processes."""
        settings = [
            f"target={self.folder / 'model'}",
            f"data={self.folder / 'documents.jsonl'}",
            "init.fit=zero",
            "init.tokens=256",
            f"loop.steps={STEPS}",
            "loop.log_every=1",
            "loop.eval_every=1",
            f"loop.save_every={SAVE_EVERY}",
            "seq_len=32",
            "batch_size=8",
            "mesh.fsdp=2",
            "mesh.expert=2",
            f"cpu_devices={8 // count}",
        ]
        command = [sys.executable, "-c", _DEJAX, "distill", "distill_tiny", "--set", *settings]
        command += ["--out", str(self.folder / out)]
        port, processes = free_port(), []
        for index in range(count):
            where = [] if count == 1 else ["--distributed", f"127.0.0.1:{port},{count},{index}"]
            with open(self.errors(out, index), "w") as errors:
                started = subprocess.Popen(
                    [*command, *where], cwd=ROOT, env=environment(), stdout=errors, stderr=errors
                )
            processes.append(started)
        self.started.extend(processes)
        return processes

    def errors(self, out: str, index: int) -> Path:
        """What a process said."""
        return self.folder / f"{out}.{index}.log"

    def rows(self, out: str) -> list[dict]:
        """The whole lines of a run's metrics."""
        file = self.folder / out / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]

    def last_step(self, out: str) -> int:
        """The newest step in a run's metrics."""
        return max((row["step"] for row in self.rows(out)), default=0)

    def saved(self, out: str) -> list[int]:
        """Steps of the whole checkpoints of a run."""
        folder = self.folder / out / "checkpoints"
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_model(folder / "model")
    write_documents(folder / "documents.jsonl", count=100)
    world = World(folder, [])
    yield world
    for process in world.started:  # where a test has failed, one may wait for the other
        process.kill()


@pytest.fixture(scope="module")
def straight(world):
    """The metrics of the whole run in one process."""
    (process,) = world.start("straight", 1)
    assert process.wait(LONGEST) == 0, world.errors("straight", 0).read_text()
    return world.rows("straight")


@pytest.fixture(scope="module")
def killed(world):
    """Two processes of which one is killed: how the other ended, in how many seconds, and where."""
    first, second = processes = world.start("two", 2)
    until(lambda: world.last_step("two") >= SAVE_EVERY + 2, *processes)
    second.kill()
    began = time.monotonic()
    status = first.wait(LONGEST)
    seconds = time.monotonic() - began
    time.sleep(1)  # for the last word, which another process has
    said = world.errors("two", 0).read_text()
    return status, seconds, said, world.last_step("two")


@pytest.fixture(scope="module")
def stopped(world, killed):
    """The same run again, told to stop by a SIGTERM to one of them: (status, what it said) each."""
    before = killed[-1]
    processes = world.start("two", 2)
    until(lambda: world.last_step("two") > before, *processes)
    seen = world.last_step("two")
    processes[1].send_signal(signal.SIGTERM)
    ended = [process.wait(LONGEST) for process in processes]
    said = [world.errors("two", index).read_text() for index in range(2)]
    return seen, ended, said, world.saved("two"), world.rows("two")


@pytest.fixture(scope="module")
def finished(world, stopped):
    """The metrics of the run of two processes, killed and stopped on the way."""
    processes = world.start("two", 2)
    ended = [process.wait(LONGEST) for process in processes]
    assert ended == [0, 0], world.errors("two", 0).read_text()
    return world.rows("two")


def test_when_one_is_killed_the_other_ends_by_itself(killed):
    status, seconds, said, _ = killed
    assert status != 0
    assert "another task died" in said, said  # JAX's own words
    assert "dejax: error: process 0 of 2 was ended, by a signal or because another process" in said
    assert seconds < LONGEST / 2  # rather than wait for ever


def test_a_signal_to_one_saves_the_same_step_in_all(stopped):
    seen, ended, said, saved, rows = stopped
    assert ended == [1, 1]
    last = rows[-1]["step"]
    line = f"dejax: error: distill: told to stop, after step {last} of {STEPS}; its checkpoint is "
    for text in said:
        assert line + "saved: the same command goes on from there" in text.splitlines()[-1]
        assert "was ended" not in text
    assert seen <= last < STEPS and saved[-1] == last


def test_every_step_is_there_once(finished):
    assert [row["step"] for row in finished] == list(range(1, STEPS + 1))


def test_two_processes_killed_and_stopped_train_as_one_does(straight, finished):
    for row, expected in zip(finished, straight, strict=True):
        for name in MEASURED:
            assert row[name] == pytest.approx(expected[name], rel=1e-5), (row["step"], name)


# --- loading ---------------------------------------------------------------------------------

_LOAD = """
import json, sys
import jax
from dejax.ckpt import hf_weights
from dejax.sharding import MeshConfig, make_mesh
from train.devices import start_devices
from train.teacher import load_teacher

folder, address, index, result = sys.argv[1:]
start_devices(2, f"{address},2,{index}")
read, calls = hf_weights.read_expert, []

def counted(plan, layer, expert, **options):
    calls.append((layer, expert))
    return read(plan, layer, expert, **options)

hf_weights.read_expert = counted
load_teacher(folder, make_mesh(MeshConfig(fsdp=2, expert=2)))
with open(result, "w") as file:
    json.dump(calls, file)
"""


def test_a_process_reads_its_own_experts_alone(world, tmp_path):
    address, started = f"127.0.0.1:{free_port()}", []
    for index in range(2):
        given = [str(world.folder / "model"), address, str(index), str(tmp_path / f"{index}.json")]
        command = [sys.executable, "-c", _LOAD, *given]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment()))
    assert [process.wait(LONGEST) for process in started] == [0, 0]
    both = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    for calls in both:
        assert len(calls) == 3 * 4  # half of the eight experts of three layers, each once
    pairs = [[layer, expert] for layer in range(3) for expert in range(8)]
    assert sorted(both[0] + both[1]) == pairs
