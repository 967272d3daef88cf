"""Training a predictor of experts: its gradient, what it can learn, and a run that was stopped."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.ckpt.draft_state import load_draft, save_draft
from dejax.ckpt.predictor_file import FILE, load_predictor
from dejax.cli import main as dejax
from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.draft.predictor import predictor_shapes
from dejax.errors import UsageError
from dejax.target import load_target
from infer.decoder import Decoder
from infer.passes import Drafting
from tests.infer.random_target import SHAPES, VOCAB, draft_of, random_target
from tests.infer.test_predictor import pairs_of, predictor_of
from tests.train.small_model import write_documents, write_model
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig
from train.predictor import PredictorConfig, held_out, main, train_predictor
from train.predictor_step import BINS, Candidates, candidates_of, predictor_loss, predictor_totals
from train.teacher import as_teacher

ROWS, LENGTH, STEPS = 8, 32, 150


def batch_at(step, rows=None):
    """Random tokens: nothing in them tells of their neighbours."""
    tokens = np.random.default_rng(step).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((ROWS, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "mask": np.ones((ROWS, LENGTH), np.float32),
    }
    return batch if rows is None else {name: a[rows.start : rows.stop] for name, a in batch.items()}


def config_of(steps=STEPS, **changes):
    return PredictorConfig(
        target="random",
        rank=24,
        optimizer=OptimizerConfig(learning_rate=3e-2, warmup_steps=5, decay_steps=steps // 2),
        loop=LoopConfig(steps=steps, log_every=50, save_every=changes.pop("save_every", 0)),
        seq_len=LENGTH,
        batch_size=ROWS,
        **changes,
    )


def by_token_alone(seed=0):
    """A target whose experts depend on nothing but the token, since no layer adds anything."""
    target = random_target("shared", dtype=jnp.float32, seed=seed)
    for layer in target.model.layers:
        layer.attention.o_proj.weight[...] = jnp.zeros_like(layer.attention.o_proj.weight[...])
        for part in (layer.mlp, layer.shared):
            if part is not None:
                part.down_proj.weight[...] = jnp.zeros_like(part.down_proj.weight[...])
    routed = {layer: jnp.zeros_like(stack) for layer, stack in target.routed.items()}
    return dataclasses.replace(target, routed=routed)


def random_candidates(rng, config, *, rows=2, length=3):
    layers, experts, top_k = len(config.moe_layers), config.moe.num_experts, config.moe.top_k
    shape = (rows, length, layers)
    ids = lambda: rng.random((*shape, experts)).argsort(axis=-1)[..., :top_k]  # noqa: E731
    state, token = rng.standard_normal((2, rows, length, config.width))
    mask = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    return Candidates(*map(jnp.asarray, (state, token, ids(), ids(), mask)))


def test_the_gradient_is_that_of_finite_differences():
    with jax.enable_x64(True):
        config, rng = SHAPES["shared"], np.random.default_rng(0)
        shapes = predictor_shapes(config, 4)
        params = {name: jnp.asarray(rng.standard_normal(s)) for name, s in shapes.items()}
        found = random_candidates(rng, config)
        loss = jax.jit(lambda p: predictor_loss(p, found)[0])
        grads = jax.grad(loss)(params)
        for name, shape in shapes.items():
            way = {name: jnp.asarray(rng.standard_normal(shape))}
            moved = lambda by, way=way: {k: a + by * way.get(k, 0.0) for k, a in params.items()}  # noqa: E731
            slope = (loss(moved(1e-6)) - loss(moved(-1e-6))) / 2e-6
            expected = float(jnp.vdot(grads[name], way[name]))
            assert expected != 0
            np.testing.assert_allclose(float(slope), expected, rtol=1e-6)


@pytest.mark.slow
def test_totals_are_counted_one_by_one():
    with jax.enable_x64(True):
        config, rng = SHAPES["shared"], np.random.default_rng(1)
        zeros = {name: jnp.zeros(s) for name, s in predictor_shapes(config, 4).items()}
        bias = jnp.asarray(rng.standard_normal((2, 8)))
        found = random_candidates(rng, config)
        totals = predictor_totals(zeros | {"bias": bias}, found)
        loss, hits, told = 0.0, 0, {name: np.zeros(BINS) for name in ("p", "y", "cp", "cy")}
        for row, place in np.argwhere(np.asarray(found.mask)):
            for layer in range(2):
                wanted = set(np.asarray(found.wanted)[row, place, layer].tolist())
                best = np.argsort(-np.asarray(bias[layer]))[:3].tolist()
                hits += len(wanted & set(best))
                for expert in range(8):
                    p, y = 1 / (1 + np.exp(-float(bias[layer, expert]))), expert in wanted
                    loss -= np.log(p if y else 1 - p)
                    told["p"][int(p * BINS)] += p
                    told["y"][int(p * BINS)] += y
                    told["cp"][int(p * BINS)] += p * (expert in best)
                    told["cy"][int(p * BINS)] += y * (expert in best)
        np.testing.assert_allclose(totals["loss"].mean, loss / (4 * 2 * 8))
        np.testing.assert_allclose(totals["recall"].mean, hits / (4 * 2 * 3))
        names = ("predicted", "needed", "chosen", "chosen_needed")
        for name, sums in zip(names, told.values(), strict=True):
            np.testing.assert_allclose(totals[name].sum, sums, atol=1e-12)


@pytest.mark.slow
def test_where_experts_follow_from_the_token_they_are_all_foretold():
    target = by_token_alone()
    draft = draft_of(target)
    teacher = as_teacher(target)
    predictor, log = train_predictor(teacher, draft, batch_at, config_of())
    scores = held_out(teacher, draft, predictor.params, [batch_at(10**6)], block=4)
    assert scores["heldout_recall"] > 0.995
    assert scores["heldout_ece"] < 0.02
    assert log[-1]["loss"] < 0.1 * log[0]["loss"]


@pytest.mark.slow
def test_what_is_learned_is_what_a_decode_sees():
    """States and routes of the training's rows are those of the draft passes of the loop."""
    with jax.enable_x64(True):
        target = random_target("shared")
        draft = draft_of(target)
        teacher = as_teacher(target)
        tokens = batch_at(3)["tokens"][:1, :12]
        batch = {
            "tokens": tokens,
            "positions": np.arange(12, dtype=np.int32)[None],
            "segment_ids": np.ones_like(tokens),
            "mask": np.ones(tokens.shape, np.float32),
            "blocks": (np.arange(12, dtype=np.int32)[None] >= 8).astype(np.int32),
        }
        made = jax.jit(
            lambda params, stacked, batch: candidates_of(
                teacher.definition, params, stacked, batch, r=1, dtype=jnp.float64
            )
        )(teacher.params, draft.stacked_params(), batch)
        predictor = predictor_of(target, draft)
        ids = tokens[0].tolist()
        with Decoder(target, draft=draft, predictor=predictor) as decoder:
            engine = decoder.engine
            engine.begin()
            engine.residency.begin_round()
            engine.prefill(ids[:8])
            for place in range(8, 11):
                passed = engine.draft_row(ids[place], start=place, drafting=Drafting(r=1))
                np.testing.assert_allclose(made.state[0, place], passed.hidden[0], rtol=1e-9)
                chosen = pairs_of(target.config, np.asarray(made.parent[0, place]))
                assert passed.routes[0] == chosen
            engine.begin()
            engine.prefill(ids[:4])
            result = engine.target_rows(ids[4:12], start=4)
            engine.residency.end_round()
        for place in range(5, 12):
            wanted = pairs_of(target.config, np.asarray(made.wanted[0, place - 1]))
            assert result.routes[place - 4] == wanted


@pytest.mark.slow
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path):
    target = random_target("shared", dtype=jnp.float32)
    draft = draft_of(target)
    teacher = as_teacher(target)
    config = config_of(6, save_every=3)
    whole, _ = train_predictor(teacher, draft, batch_at, config, workdir=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    rest, _ = train_predictor(teacher, draft, batch_at, config, workdir=tmp_path)
    again, _ = train_predictor(teacher, draft, batch_at, config)
    for name, array in whole.params.items():
        np.testing.assert_array_equal(array, rest.params[name])
        np.testing.assert_array_equal(array, again.params[name])
    with pytest.raises(UsageError, match="its checkpoints are of another run .draft was"):
        train_predictor(teacher, draft_of(target, seed=2), batch_at, config, workdir=tmp_path)
    with pytest.raises(UsageError, match="has checkpoints; resume, or choose another folder"):
        train_predictor(teacher, draft, batch_at, config, workdir=tmp_path, resume=False)


@pytest.mark.slow
def test_the_command_trains_what_generate_takes(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    target = load_target(model)
    width = target.config.moe.expert_width
    draft = random_draft(target.config, DraftConfig(width), seed=0, identity=target.identity)
    folder = save_draft(tmp_path / "draft", draft, target.config)
    data = write_documents(tmp_path / "text.jsonl")
    call = ["--target", str(model), "--draft", str(folder), "--out", str(tmp_path / "out")]
    call += ["--data", str(data), "--steps", "4", "--seq-len", "16", "--batch-size", "2"]
    assert main([*call, "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    predictor = load_predictor(tmp_path / "out", target, load_draft(folder, target))
    assert result["parameters"] == predictor.size
    assert 0 <= result["heldout"]["heldout_recall"] <= 1
    assert result["cost"]["candidates"] == 64
    assert main(call) == 0  # all steps done: it tells the same again
    assert "share of a node's experts that were foretold" in capsys.readouterr().out
    words = ["generate", str(model), "--prompt", "the draft", "--max-new-tokens", "12"]
    eco = ["--mode", "ecospec", "--draft", str(folder), "--no-governor"]
    trained = ["--predictor", str(tmp_path / "out" / FILE)]
    assert dejax([*words, *eco, *trained, "--json", str(tmp_path / "eco.json")]) == 0
    assert dejax([*words, "--json", str(tmp_path / "ar.json")]) == 0
    eco, ar = (
        json.loads((tmp_path / f"{name}.json").read_text())["generations"][0]
        for name in ("eco", "ar")
    )
    assert eco["tokens"] == ar["tokens"] and eco["stats"]["predictor"] == "trained"
