"""`--memory`: one budget, planned before a weight is read, and kept to."""

import dataclasses
import json

import numpy as np
import pytest

from dejax import cli
from dejax.errors import UsageError
from infer.memory import plan_memory
from infer.staging import DeviceForm
from tests.infer.random_target import SHAPES
from tests.train.small_model import write_model

CONFIG = SHAPES["shared"]
FORM = DeviceForm(None, np.dtype(np.float32), CONFIG.expert_shape)
EVERY = len(CONFIG.moe_layers) * CONFIG.moe.num_experts * FORM.bytes


def plan(budget, **changes):
    options = dict(
        weights=1000,
        record_bytes=FORM.bytes,
        draft_experts=0,
        capacity=64,
        compute_dtype=np.float32,
        draft_length=0,
        r=0,
        readers=2,
    )
    return plan_memory(CONFIG, FORM, budget=budget, **(options | changes))


def least():
    """A budget that just does, found by asking."""
    low, high = 0, 2**34
    while high - low > 2**12:
        middle = (low + high) // 2
        try:
            plan(middle)
            high = middle
        except UsageError:
            low = middle
    return high


def test_what_is_dealt_out_fits_the_budget():
    smallest = least()
    for more in (2**17, 2**20, 2**26):
        found = plan(smallest + more)
        assert found.total <= smallest + more + 2**20  # the process may grow in between
        assert found.experts <= EVERY and found.prefetch <= found.experts
    assert plan(smallest + 2**30).experts == EVERY


def test_more_of_anything_leaves_less_for_experts():
    budget = least() + 2**16
    roomy = plan(budget).total - plan(budget).experts
    for changes in ({"weights": 9000}, {"capacity": 256}, {"readers": 8}, {"draft_experts": 5000}):
        fixed = plan(budget + 2**28, **changes)
        assert fixed.total - fixed.experts > roomy - 2**16


def test_too_little_is_refused_with_what_would_do():
    with pytest.raises(UsageError, match=r"a pass needs .* KV cache .*convert --experts int4"):
        plan(2**20)
    with pytest.raises(UsageError, match="a pass needs"):
        plan(least() - 2**17, draft_length=8, r=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "plain")
    assert cli.main(["convert", str(folder / "plain"), "--out", str(folder / "converted")]) == 0
    return folder


def call(folder, *options):
    return ["generate", str(folder), "--prompt", "the draft", "--max-new-tokens", "8", *options]


@pytest.mark.slow
def test_a_decode_keeps_to_its_plan(folders, capsys):
    assert cli.main([*call(folders / "converted"), "--json", "-"]) == 0
    expected = json.loads(capsys.readouterr().out)["generations"][0]["tokens"]
    assert cli.main([*call(folders / "converted"), "--memory", "8GiB", "--json", "-"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["generations"][0]["tokens"] == expected
    assert found["memory_plan"]["experts"] > 0 and found["peak_rss_bytes"] > 2**26
    assert "memory: " in shown.err and "resident at the peak, of 8 GiB" in shown.err


@pytest.mark.parametrize(
    ("folder", "options", "says"),
    [
        ("converted", ["--memory", "1MiB"], "--memory 1 MiB does not do: a pass needs"),
        ("plain", ["--memory", "8GiB"], "is not converted"),
        ("converted", ["--memory", "8GiB", "--device-cache", "0"], "--memory deals out the caches"),
        ("converted", ["--memory", "8GiB", "--engine", "resident"], "--memory is for engines"),
        ("plain", ["--link", "disk"], "the disk link reads a converted target's store"),
    ],
)
def test_what_cannot_work_is_one_line(folders, capsys, folder, options, says):
    assert cli.main([*call(folders / folder), *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in error


def test_plans_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan(least() + 2**20).experts = 0  # pyright: ignore
