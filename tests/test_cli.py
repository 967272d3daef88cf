"""The `dejax` command: dispatch, exit status, and one line for what the user can mend."""

import subprocess
import sys
import types

import pytest
from safetensors import SafetensorError

import dejax
from dejax import cli
from dejax.errors import FailedError, UsageError


@pytest.fixture
def program(monkeypatch):
    """Puts a function in the place of the program of `dejax generate`."""

    def install(function):
        module = types.ModuleType("generate_stub")
        module.main = function
        monkeypatch.setitem(sys.modules, "generate_stub", module)
        monkeypatch.setitem(cli.VERBS, "generate", ("generate_stub:main", "decode text"))

    return install


def test_every_verb_has_its_program():
    for verb in cli.VERBS:
        assert callable(cli._load(verb)), verb


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in cli.VERBS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dejax {dejax.__version__}\n"


@pytest.mark.parametrize(
    ("verb", "hint"), [("genrate", "did you mean 'generate'?"), ("xyz", "see `dejax --help`")]
)
def test_unknown_verb_is_one_line(verb, hint, capsys):
    assert cli.main([verb]) == 2
    assert capsys.readouterr().err == f"dejax: error: unknown verb '{verb}'; {hint}\n"


def test_the_program_gets_the_rest_and_gives_the_status(program):
    seen = []
    program(lambda argv: seen.extend(argv) or 1)
    assert cli.main(["generate", "MODEL", "--seed", "3"]) == 1
    assert seen == ["MODEL", "--seed", "3"]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("cannot read\n  x.json"), 2, "dejax: error: cannot read x.json\n"),
        (FailedError("bad checksum"), 1, "dejax: error: bad checksum\n"),
        (KeyboardInterrupt(), 130, "dejax: error: interrupted\n"),
        (
            OSError(28, "No space left on device", "a/b"),
            1,
            "dejax: error: a/b: no space left on device\n",
        ),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            1,
            "dejax: error: no space left on device\n",
        ),
        (
            RuntimeError("RESOURCE_EXHAUSTED: out of memory"),
            1,
            "dejax: error: not enough memory; make batches, caches or the model smaller\n",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line(program, capsys, error, status, line):
    def fail(argv):
        raise error

    program(fail)
    assert cli.main(["generate"]) == status
    assert capsys.readouterr().err == line


def test_help_of_a_program_ends_with_0(program):
    program(lambda argv: sys.exit(0))
    assert cli.main(["generate", "--help"]) == 0


def test_a_defect_keeps_its_traceback(program):
    def fail(argv):
        raise ValueError("a defect")

    program(fail)
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["generate"])


def test_a_missing_program_is_told(monkeypatch, capsys):
    monkeypatch.setitem(cli.VERBS, "generate", ("infer.no_such_program:main", ""))
    assert cli.main(["generate"]) == 1
    assert "infer.no_such_program, the program of 'dejax generate'" in capsys.readouterr().err


def test_a_missing_dependency_of_a_program_is_not_taken_for_the_program(monkeypatch, tmp_path):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.VERBS, "generate", ("needs_more:main", ""))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        cli.main(["generate"])


def test_a_reader_that_leaves_early_gets_no_traceback():
    code = "from dejax.cli import main; import sys; sys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == cli.BROKEN_PIPE


def test_a_foreign_package_of_our_name_is_warned_of(tmp_path, capsys, program):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__init__.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from dejax.cli import main; sys.exit(main(['pretrain']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    warning, error = done.stderr.splitlines()
    assert warning.startswith("dejax: warning: package 'train' is ") and str(tmp_path) in warning
    assert error.startswith("dejax: error: train.pretrain") and done.returncode == 1
    program(lambda argv: 0)
    assert cli.main(["generate"]) == 0
    assert capsys.readouterr().err == ""
