"""Healing: what changes and what does not, balance, stopping and going on, the folder."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.ckpt.hf_weights import read_json
from dejax.cli import main as dejax
from dejax.errors import UsageError
from dejax.model import logits_of
from dejax.target import load_target
from tests.train.dense_model import write_dense
from tests.train.heal_cases import LAYOUT, MESHES, write_moe
from tests.train.on_devices import on_devices
from tests.train.rows import random_batch
from tests.train.small_model import write_documents
from train.heal import Pair, heal, load_pair, make_measure
from train.heal_config import HealConfig
from train.heal_step import (
    join_trained,
    loss_fn,
    split_trained,
    whole_load,
)
from train.loop import LoopConfig
from train.model_folder import write_model_folder
from train.optimizer import OptimizerConfig
from train.stacked import dense_forward, load_shares, unstack_target
from train.teacher import load_dense, one_device
from train.update import gradients

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 48))
PARTS = [("routers", "down", "norms"), ("routers",), ("norms", "down"), ("all",)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A dense model, and a MoE made of it."""
    parent = tmp_path_factory.mktemp("models")
    dense = write_dense(parent / "dense")
    return dense, write_moe(dense, parent / "moe")


@pytest.fixture(scope="module")
def config(folders) -> HealConfig:
    dense, moe = folders
    return HealConfig(
        target=str(moe),
        dense=str(dense),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=2, decay_steps=4),
        loop=LoopConfig(steps=8, log_every=1, save_every=3),
        seq_len=32,
        batch_size=4,
        eval_rows=4,
    )


@pytest.fixture(scope="module")
def pair(config) -> Pair:
    return load_pair(config, one_device())


@pytest.fixture(scope="module")
def batch_at(pair):
    model = pair.models.moe.config
    return lambda step, rows=None: random_batch(model, rows=4, length=32, seed=step % 2)


def leaves(tree) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def equal(one, other) -> bool:
    one, other = leaves(one), leaves(other)
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def straight(pair, batch_at, config, tmp_path_factory):
    """Folder, trained weights and log of a whole run."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, *heal(pair, batch_at, config, workdir=workdir)


# --- the step ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_dense_model_is_the_one_that_a_target_computes(folders, pair):
    batch = {
        "tokens": jnp.asarray(TOKENS, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(48), TOKENS.shape),
        "segment_ids": jnp.zeros(TOKENS.shape, jnp.int32),
    }
    outer, x = dense_forward(pair.models.dense, pair.constants.dense, batch)
    logits = logits_of(outer, x)
    np.testing.assert_allclose(logits, load_target(folders[0])(TOKENS), atol=2e-5)
    model, routed = unstack_target(pair.models.dense, pair.constants.dense)
    assert len(model.layers) == 3 and routed == {}


@pytest.mark.parametrize("parts", PARTS)
def test_parts_are_told_apart_and_joined_again(pair, parts):
    whole = join_trained(pair.start, pair.constants.frozen)
    trained, frozen = split_trained(whole, parts)
    assert equal(join_trained(trained, frozen), whole)
    names, kept = set(leaves(trained)), set(leaves(frozen))
    assert "layers.router.selection_bias" in kept and "outer.embedding" in kept
    assert ("layers.router.weight" in names) == bool({"routers", "all"} & set(parts))
    assert ("layers.shared.down_proj.weight" in names) == bool({"down", "all"} & set(parts))
    assert ("outer.layers.0.mlp.down_proj.weight" in names) == bool({"down", "all"} & set(parts))
    norms = {"outer.norm.weight", "layers.input_norm.weight", "layers.mlp_norm.weight"}
    assert norms <= names if {"norms", "all"} & set(parts) else not norms & names
    assert ("layers.attention.q_proj.weight" in names) == ("all" in parts)
    rows = {"all": 3, "down": 1}.get(next((p for p in parts if p in ("all", "down")), ""), 0)
    assert (trained["routed"].shape[2] if rows else 0) == rows


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.slow
def test_only_what_is_configured_changes(pair, batch_at, config, parts):
    whole = join_trained(pair.start, pair.constants.frozen)
    start, frozen = split_trained(whole, parts)
    before = leaves(whole)
    other = replace(pair, start=start, constants=pair.constants._replace(frozen=frozen))
    short = replace(config, trained=parts, loop=LoopConfig(steps=2))
    short = replace(short, optimizer=OptimizerConfig(weight_decay=0.1))
    trained, _ = heal(other, batch_at, short)
    after = leaves(join_trained(trained, frozen))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == set(leaves(start))
    same = slice(0, 0 if "all" in parts else 2)
    assert np.array_equal(before["routed"][:, :, same], after["routed"][:, :, same])
    assert equal(before, whole)  # what the run began with is not its own to change


@pytest.mark.slow
def test_the_loss_falls_and_the_models_come_nearer(straight, pair, batch_at, config):
    _, trained, log = straight
    assert [row["step"] for row in log] == list(range(1, 9))
    assert log[-1]["loss"] < 0.8 * log[0]["loss"] and log[-1]["kl"] < 0.8 * log[0]["kl"]
    measure = make_measure(pair, [batch_at(0), batch_at(1)], config)
    before, after = measure(pair.start), measure(trained)
    assert after["heldout_kl"] < 0.8 * before["heldout_kl"]
    assert after["heldout_agreement"] > before["heldout_agreement"]
    assert after["heldout_dense_next_token"] == before["heldout_dense_next_token"]
    assert after["heldout_load"] <= after["heldout_load_max"] <= LAYOUT.experts
    assert after["heldout_tokens"] == sum(batch_at(step)["mask"].sum() for step in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(pair, batch_at, remat):
    """Of the load-balance loss too: its loads are those of the whole batch."""
    options = dict(models=pair.models, dtype=jnp.float32)
    batch, loss = batch_at(0), partial(loss_fn, balance_weight=10.0, remat=remat, **options)
    of_whole = jax.jit(partial(gradients, loss))
    whole, metrics = of_whole(pair.start, batch, None, pair.constants)
    load = jax.jit(partial(whole_load, accumulate=2, **options))(pair.start, batch, pair.constants)
    in_parts = jax.jit(partial(gradients, loss, accumulate=2))
    parts, summed = in_parts(pair.start, batch, load, pair.constants)
    for name, value in metrics.items():
        np.testing.assert_allclose(summed[name], value, rtol=1e-5, err_msg=name)
    found, expected = leaves(parts), leaves(whole)
    for name in expected:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], atol=2e-5 * scale, err_msg=name)
    even = load_shares(jnp.ones_like(load))  # other loads are another gradient
    other = leaves(of_whole(pair.start, batch, even, pair.constants)[0])["layers.router.weight"]
    assert not np.allclose(other, expected["layers.router.weight"], rtol=1e-3)


@pytest.mark.slow
def test_the_gradient_is_that_of_finite_differences(pair, batch_at):
    """Of KL and load-balance loss with the loads held, in float64, along a random direction."""
    with jax.enable_x64(True):
        wide = partial(jax.tree.map, lambda a: jnp.asarray(a, jnp.float64))
        trained, constants = wide(pair.start), wide(pair.constants)
        batch = batch_at(0)
        options = dict(models=pair.models, dtype=jnp.float64)
        load = whole_load(trained, batch, constants, accumulate=1, **options)
        loss = jax.jit(
            lambda t: loss_fn(t, batch, load, constants, balance_weight=2.0, **options)[0]
        )
        rng = np.random.default_rng(1)
        towards = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)) * 1e-2, trained)
        slope = sum(
            float(np.sum(np.asarray(g) * t))
            for g, t in zip(*map(jax.tree.leaves, (jax.grad(loss)(trained), towards)), strict=True)
        )

        def at(step):
            return float(loss(jax.tree.map(lambda a, t: a + step * t, trained, towards)))

        h = 1e-5
        assert (at(h) - at(-h)) / (2 * h) == pytest.approx(slope, rel=1e-4)


@pytest.mark.slow
def test_the_load_balance_loss_evens_the_load(pair, batch_at, config):
    """Routers that all lean to one expert; the same run with and without the loss."""
    start = jax.tree.map(jnp.copy, pair.start)
    router = start["layers"]["router"]["weight"]
    start["layers"]["router"]["weight"] = 0.02 * router
    skewed, spread = replace(pair, start=start), {}
    for weight in (0.0, 1.0):
        steps = LoopConfig(steps=30, log_every=1)
        run = replace(config, trained=("routers",), balance_weight=weight, loop=steps)
        rest = split_trained(join_trained(start, pair.constants.frozen), ("routers",))
        alone = replace(skewed, start=rest[0], constants=pair.constants._replace(frozen=rest[1]))
        _, log = heal(alone, batch_at, run)
        spread[weight] = log[0]["load_max"], np.mean([row["load_max"] for row in log[-4:]])
    assert spread[1.0][1] < spread[1.0][0] and spread[1.0][1] < spread[0.0][1]


@pytest.mark.slow
def test_a_mesh_gives_the_gradients_of_one_device(tmp_path):
    found = on_devices(8, "tests.train.heal_cases", "differences", result=tmp_path / "found.json")
    assert found.keys() == MESHES.keys()
    for name, largest in found.items():
        assert largest["gradient"] < 1e-4 and largest["metrics"] < 1e-5, (name, largest)


# --- stopping and going on ---------------------------------------------------------------------


class Stop(Exception):
    """A run ends in the middle of a step."""


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(straight, pair, batch_at, config, tmp_path):
    def stops(step, rows=None):
        if step == 5:
            raise Stop
        return batch_at(step, rows)

    with pytest.raises(Stop):
        heal(pair, stops, config, workdir=tmp_path)
    trained, rest = heal(pair, batch_at, config, workdir=tmp_path)
    _, whole, log = straight
    assert [row["step"] for row in rest] == [4, 5, 6, 7, 8]
    assert [row["loss"] for row in rest] == [row["loss"] for row in log[3:]]
    assert equal(trained, whole)


@pytest.mark.slow
def test_other_models_or_settings_are_another_run(straight, pair, batch_at, config):
    workdir = straight[0]
    dense = replace(pair, identities=pair.identities | {"dense": "other"})
    with pytest.raises(UsageError, match="another run .dense was .*, now other"):
        heal(dense, batch_at, config, workdir=workdir)
    for change in ({"balance_weight": 0.5}, {"trained": ("all",)}):
        with pytest.raises(UsageError, match=f"another run .{next(iter(change))} was"):
            heal(pair, batch_at, replace(config, **change), workdir=workdir)
    with pytest.raises(UsageError, match="has checkpoints; resume, or"):
        heal(pair, batch_at, config, workdir=workdir, resume=False)


# --- the program -------------------------------------------------------------------------------

CONFIG = """
from train.heal_config import HealConfig
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig

def get_config():
    return HealConfig(
        target={moe!r}, dense={dense!r}, data={data!r}, seq_len=32, batch_size=4, eval_rows=4,
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=2, decay_steps=4),
        loop=LoopConfig(steps=4, log_every=2, eval_every=2, save_every=2),
    )
"""


@pytest.fixture(scope="module")
def file(folders, tmp_path_factory) -> Path:
    """A config file for the two models and a few documents."""
    parent = tmp_path_factory.mktemp("config")
    data = write_documents(parent / "text.jsonl")
    path = parent / "heal.py"
    path.write_text(CONFIG.format(moe=str(folders[1]), dense=str(folders[0]), data=str(data)))
    return path


@pytest.fixture(scope="module")
def healed(file, tmp_path_factory) -> tuple[Path, dict]:
    """Folder and result of the program."""
    out = tmp_path_factory.mktemp("healed") / "run"
    assert dejax(["distill", str(file), "--out", str(out), "--json", str(out) + ".json"]) == 0
    return out, json.loads(Path(str(out) + ".json").read_text())


@pytest.mark.slow
def test_the_program_writes_a_folder_like_the_one_it_healed(healed, folders, file):
    out, result = healed
    moe = folders[1]
    names = {entry.name for entry in (out / "model").iterdir()}
    assert names == {entry.name for entry in moe.iterdir()} | {"healing.json"}
    assert read_json(out / "model" / "config.json") == read_json(moe / "config.json")
    record = read_json(out / "model" / "healing.json")
    assert record["target"] == load_target(moe).identity and record["config"]["trained"]
    assert record["heldout"] == result["heldout"] != result["before"] == record["before"]
    assert [row["step"] for row in result["log"]] == [2, 4]
    assert result["log"][-1]["heldout_kl"] == pytest.approx(result["heldout"]["heldout_kl"])
    before, after = load_target(moe), load_target(out / "model")
    for one, other in zip(before.model.layers, after.model.layers, strict=True):
        q = [np.asarray(layer.attention.q_proj.weight[...]) for layer in (one, other)]
        assert np.array_equal(*q)
        if one.router is not None:
            bias = [np.asarray(layer.router.selection_bias[...]) for layer in (one, other)]
            assert np.array_equal(*bias) and bias[0].any()
    # The same command on a finished run writes the same.
    weights = (out / "model" / "model.safetensors").read_bytes()
    assert dejax(["distill", str(file), "--out", str(out)]) == 0
    assert (out / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_the_folder_has_the_logits_of_the_trained_weights(straight, pair, folders, tmp_path):
    trained = straight[1]
    params = join_trained(trained, pair.constants.frozen)
    model, routed = unstack_target(pair.models.moe, params)
    raw = read_json(folders[1] / "config.json")
    write_model_folder(tmp_path / "moe", raw, model, routed, dtype=jnp.float32, source=folders[1])
    written = load_target(tmp_path / "moe")
    held = replace(load_target(folders[1]), model=model, routed=routed)
    assert np.array_equal(written(TOKENS), held(TOKENS))
    assert not np.allclose(written(TOKENS), load_target(folders[1])(TOKENS), atol=1e-3)


@pytest.mark.slow
def test_transformers_computes_the_same(healed):
    from tests.families import reference

    out, _ = healed
    theirs = reference.load(out / "model")
    ours = load_target(out / "model")
    assert np.abs(np.asarray(ours(TOKENS)) - reference.logits(theirs, TOKENS)).max() < 2e-4


@pytest.mark.slow
def test_a_dry_run_tells_what_is_trained_and_what_it_takes(file, pair, tmp_path, capsys):
    found = tmp_path / "plan.json"
    assert dejax(["distill", str(file), "--dry-run", "--json", str(found)]) == 0
    plan, size = json.loads(found.read_text()), lambda t: sum(a.size for a in leaves(t).values())
    assert plan["trained_params"] == size(pair.start)
    assert plan["frozen_params"] == size(pair.constants.frozen)
    assert plan["dense_params"] == size(pair.constants.dense)
    assert plan["target_bytes"] == 4 * (plan["frozen_params"] + plan["dense_params"])
    assert 3 * 4 * plan["trained_params"] <= plan["state_bytes"] < 3.1 * 4 * plan["trained_params"]
    assert plan["step_bytes"] > 0 and plan["tokens"] == 4 * 4 * 32
    assert "healing of" in capsys.readouterr().out


# --- bad input ---------------------------------------------------------------------------------


def refused(capsys, file: Path, *settings: str) -> str:
    """The one line of a call that exits with status 2 before it makes anything."""
    out = file.parent / "refused"
    assert dejax(["distill", str(file), "--out", str(out), "--set", *settings]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert not out.exists()
    return line


def test_models_that_do_not_fit_are_refused(file, folders, capsys, tmp_path):
    dense, moe = map(str, folders)
    bad = partial(refused, capsys, file)
    assert "is a dense llama; expected a mixture of experts" in bad(f"target={dense}")
    assert "is a mixture of experts already; expected a dense model" in bad(f"dense={moe}")
    assert "nowhere does not exist; expected a model folder" in bad("target=nowhere")
    assert "nowhere does not exist; expected a model folder" in bad("dense=nowhere")
    assert "nowhere.gguf" in bad("dense=nowhere.gguf")
    small = write_dense(tmp_path / "small", vocab_size=288)
    line = bad(f"dense={small}")
    assert "the dense model has a vocabulary of 288 tokens, the target of 272" in line
    assert "seq_len is 4096; expected at most the target's" in bad("seq_len=4096")
    short = write_dense(tmp_path / "short", max_position_embeddings=16)
    assert "seq_len is 32; expected at most the dense model's 16" in bad(f"dense={short}")
    assert "'bias' is not one of routers, down, norms, all" in bad("trained=bias")
    assert "trained is empty" in bad("trained=()")
    assert "balance_weight is -1.0; expected 0 or more" in bad("balance_weight=-1")
    assert "loop.norms_every is 2; expected 0 in a healing" in bad("loop.norms_every=2")
    assert "batch_size is 3; expected a multiple of 2" in bad("batch_size=3", "accumulate=2")


def test_a_tokenizer_of_other_tokens_is_refused(file, folders, capsys, tmp_path):
    other = write_dense(tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = sorted(vocabulary)[20:22]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(tokenizer))
    assert "tokenizer has other tokens" in refused(capsys, file, f"dense={other}")


def test_a_quantised_target_is_refused(file, folders, capsys, tmp_path):
    moe = write_moe(folders[0], tmp_path / "moe")
    raw = read_json(moe / "config.json")
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (moe / "config.json").write_text(json.dumps(raw))
    assert "is quantised" in refused(capsys, file, f"target={moe}")


def test_a_model_without_its_checkpoints_is_left_alone(file, capsys, tmp_path):
    (tmp_path / "model").mkdir()
    assert dejax(["distill", str(file), "--out", str(tmp_path)]) == 2
    assert "exists, but no checkpoint of it" in capsys.readouterr().err


def test_a_dense_teacher_is_no_moe(folders):
    with pytest.raises(UsageError, match="is a mixture of experts; expected a dense model"):
        load_dense(folders[1], one_device())
