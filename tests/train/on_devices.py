"""Runs a function of a test module on virtual CPU devices, in a process of its own.

A process shows as many devices as it started with, and the tests' own shows one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

FAST_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Small programs: most of their time is the compiler's."""

_CALL = """
import importlib, json, sys
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
found = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])(*sys.argv[5:])
with open(sys.argv[4], "w") as file:
    json.dump(found, file)
"""


def environment(**more: str) -> dict[str, str]:
    """That of this process, with these packages and a compiler in a hurry."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_FLAGS": FAST_COMPILER,
    }
    return {**os.environ, **own, **more}


def on_devices(count: int, module: str, function: str, *args: str, result: Path) -> Any:
    """What `module.function(*args)` returns (plain JSON values) in a process of `count` devices."""
    command = [sys.executable, "-c", _CALL, str(count), module, function, str(result), *args]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())
