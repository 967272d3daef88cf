"""The `dejax` command: a table of verbs, each the name of a program that is loaded when asked for.

A program is `main(argv) -> exit status` (0 done, 1 failed, 2 the call or its input was wrong). This
is the composition root: the one place in `dejax` that reads argv, prints, and knows of programs.
"""

import difflib
import errno
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

import dejax
from dejax.errors import FailedError, UsageError
from dejax.paths import shown

VERBS = {
    "demo": ("train.demo:main", "the whole job on the embedded target: distill, decode, check"),
    "inspect": ("infer.inspect:main", "family, dimensions, bytes by part, what fits where"),
    "convert": ("infer.convert:main", "a Hugging Face folder to resident weights + expert store"),
    "pretrain": ("train.pretrain:main", "train a small target from a config file"),
    "upcycle": ("train.upcycle:main", "a dense model to a mixture of experts, without training"),
    "distill": ("train.distill:main", "train draft experts for a target from a config file"),
    "evaluate": ("train.evaluate:main", "the quality of draft experts: agreement, acceptance"),
    "generate": ("infer.generate:main", "decode text"),
    "verify": ("infer.verify:main", "the exactness gate: every mode beside autoregressive tokens"),
    "bench": ("train.bench:main", "links, steps and decoding speed, each beside its limit"),
    "export": ("infer.export:main", "write a model in another format"),
}

Program = Callable[[list[str]], int]
"""argv -> exit status."""

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: list[str] | None = None) -> int:
    """Runs `dejax ARGV` (default: this process's) and returns the exit status."""
    return _run("dejax", _dispatch, argv)


def run_module(name: str, program: Program) -> int:
    """Runs `python -m NAME` as a verb runs: the program of a module that is no verb."""

    def prepared(argv: list[str]) -> int:
        _keep_compilations()
        return program(argv)

    return _run(name, prepared, None)


def _run(name: str, program: Program, argv: list[str] | None) -> int:
    """Runs a program and returns the exit status.

    What the user can mend is one line on standard error; only a defect of ours, or of a library,
    ends in a traceback.
    """
    # That torch is missing is no news to who installed this: nothing here needs it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character shows its escape; standard error does so by itself.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = program(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except (UsageError, FailedError) as error:
        _say("error", str(error), name)
        return error.exit_status
    except KeyboardInterrupt:
        _say("error", "interrupted", name)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader is gone (`dejax ... | head`): give Python's own flush at exit a place to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        # A full disk or a lost permission is the machine's; without a file it is a defect.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = "" if error.filename is None else f"{shown(os.fsdecode(error.filename))}: "
            _say("error", f"{where}no space left on device", name)
            return FailedError.exit_status
        if error.filename is None or error.strerror is None:
            raise
        _say("error", f"{shown(os.fsdecode(error.filename))}: {error.strerror.lower()}", name)
        return FailedError.exit_status
    except SafetensorError as error:
        # ENOSPC as safetensors says it, where no whole folder is written.
        if f"os error {errno.ENOSPC})" not in str(error):
            raise
        _say("error", "no space left on device", name)
        return FailedError.exit_status
    except (MemoryError, RuntimeError) as error:
        # XLA's way to say that the memory does not suffice.
        if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        _say("error", "not enough memory; make batches, caches or the model smaller", name)
        return FailedError.exit_status


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] == "--version":
        print(f"dejax {dejax.__version__}")
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "see `dejax --help`"
        raise UsageError(f"unknown verb {verb!r}; {hint}")
    _warn_of_shadows()
    _keep_compilations()
    program = _load(verb)
    try:
        return program(rest)
    except SystemExit as stop:  # `--help` has been printed
        return int(stop.code or 0)


def _keep_compilations() -> None:
    """Has JAX keep what it compiles for the next call, unless the user chose a place already."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "dejax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _help() -> str:
    rows = [f"  {verb:<10}{line}" for verb, (_, line) in VERBS.items()]
    return "\n".join(
        [
            "usage: dejax VERB [OPTIONS]",
            "",
            "Speculative decoding for offloaded mixture-of-experts language models.",
            "",
            *rows,
            "",
            "`dejax VERB --help` lists the options of a verb; `dejax --version` tells the version.",
        ]
    )


def _load(verb: str) -> Program:
    module_name, function = VERBS[verb][0].split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, module_name.split(".")[0]):
            raise
        raise FailedError(
            f"{module_name}, the program of 'dejax {verb}', was not found; "
            f"expected in {_home()}: install dejax again"
        ) from error
    return getattr(module, function)


def _home() -> Path:
    """The folder that holds `dejax` and, beside it, `train`, `infer` and `configs`."""
    return Path(__file__).resolve().parent.parent


def _warn_of_shadows() -> None:
    for name in ("train", "infer", "configs"):
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or [spec.origin]) if spec else []
        if places and str(_home() / name) not in [str(Path(p or "").resolve()) for p in places]:
            _say("warning", f"package {name!r} is {places[0]}, which hides the one of dejax")


def _say(kind: str, message: str, name: str = "dejax") -> None:
    print(f"{name}: {kind}: {' '.join(message.split())}", file=sys.stderr)
