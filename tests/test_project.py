"""The project's own rules: who imports whom, what an import may do, what tracked files may hold."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from importlinter import cli as importlinter

from dejax.cli import VERBS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dejax", "train", "infer", "configs")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
]
OPTIONAL = ("tyro", "grain", "gguf", "datasets", "torch")
"""What no module of ours may need in order to be imported."""


def tracked_files() -> list[Path]:
    """Every file of the project that git knows."""
    command = ["git", "ls-files", "--cached"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def calls_and_names(path: Path) -> set[str]:
    """The dotted names that a source file uses, such as `os.environ` or `print`."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {ast.unparse(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}


def test_import_law(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert importlinter.lint_imports(no_cache=True) == 0


def test_no_torch_in_the_library():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), path


def test_library_prints_nothing_and_reads_no_surroundings():
    for path in (ROOT / "dejax").rglob("*.py"):
        if path.name != "cli.py":
            used = calls_and_names(path) & {"print", "sys.argv", "os.environ", "os.getenv"}
            assert not used, f"{path}: {used}"


def test_no_module_changes_settings_of_the_process():
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path
    for path in (ROOT / "dejax").rglob("*.py"):
        if path.name != "cli.py":
            assert "jax.config.update" not in calls_and_names(path), path


def test_one_place_writes_partition_specs():
    for path in SOURCES:
        if path.name != "sharding.py":
            assert "PartitionSpec" not in path.read_text(), path
            assert "jax.P" not in calls_and_names(path), path


def test_names_say_what_a_file_is_for():
    vague = {"utils", "util", "common", "helpers", "misc"}
    assert not [path for path in tracked_files() if path.stem in vague]


def test_files_stay_small():
    sources = [path for path in tracked_files() if path.suffix == ".py"]
    lines = {path: len(path.read_text().splitlines()) for path in sources}
    assert not [str(p) for p, n in lines.items() if n > (500 if "tests" in p.parts else 400)]
    assert sum(path.stat().st_size for path in tracked_files()) < 48 * 2**20


def test_tracked_files_name_no_machine_and_no_package_index():
    # Put together here, so that this file does not hold what it looks for.
    paths = "|".join(f"/{folder}/" for folder in ("work", "root", "home", "opt", "tmp"))
    hosts = "|".join(
        ["py" + "pi.org", "python" + "hosted", "registry.npm" + "js", "deb." + "debian"]
    )
    forbidden = re.compile(f"(?<![\\w.])(?:{paths})\\w|{hosts}")
    for path in tracked_files():
        data = path.read_bytes()
        # The texts under assets are data: what they name is not ours to choose.
        if b"\0" not in data and ROOT / "dejax" / "assets" not in path.parents:
            found = forbidden.search(data.decode("utf-8", "replace"))
            assert found is None, f"{path}: {found}"


def test_readme_and_ci_run_the_same_commands():
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    commands = [part.strip() for line in lines for part in line.split("&&")]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "pytest" in commands and "pytest" in ci
    assert any(command.startswith("pip install -e") for command in commands)
    verbs = [command.split()[1] for command in commands if command.startswith("dejax ")]
    assert "demo" in verbs
    assert set(verbs) <= {*VERBS, "--help", "--version"}


def test_imports_have_no_side_effects():
    code = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None
import dejax
assert not [name for name in ("jax", "numpy") if name in sys.modules], "import dejax is not free"
import importlib, os
import jax
from jax._src import xla_bridge
settings, surroundings = dict(jax.config.values), dict(os.environ)
for name in {MODULES}:
    importlib.import_module(name)
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert dict(jax.config.values) == settings, "jax.config was changed"
assert dict(os.environ) == surroundings, "the environment was changed"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_programs_run_as_verbs_do():
    """`python -m MODULE` ends in a line too, not in a traceback, where the user can mend it."""
    for path in SOURCES:
        _, main, program = path.read_text().partition('if __name__ == "__main__":\n')
        if main and path.stem != "__main__":
            assert program == f'    sys.exit(run_module("{path.stem}", main))\n', path
