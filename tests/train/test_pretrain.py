"""Pretraining end to end on a few tokens: it learns, resumes to the bit, and writes a target."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import FailedError, UsageError
from dejax.target import load_target
from train.data import Phase, TokenArrays, _save_tokens
from train.loop import LoopConfig, run
from train.losses import gate_concentration, load_balance
from train.optimizer import OptimizerConfig, make_optimizer, schedule
from train.pretrain import PretrainConfig, main

MODEL = dict(
    model_type="deepseek_v2",
    vocab_size=262,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    topk_method="greedy",
    tie_word_embeddings=True,
    eos_token_id=0,
)


def config(steps: int, **changes) -> PretrainConfig:
    """A run over two batch shapes, in which most of the schedule is the constant part."""
    settings = dict(
        model=MODEL,
        phases=(Phase(0, 16, 4), Phase(6, 32, 2)),
        optimizer=OptimizerConfig("adamw", 5e-3, warmup_steps=2, decay_steps=4),
        loop=LoopConfig(steps=steps, log_every=1, eval_every=steps, save_every=4),
        spread_weight=0.1,
    )
    return PretrainConfig(**(settings | changes))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Token arrays in which each token tells the next one, and a tokenizer to go with them."""
    from train.tokenizer import save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("data")
    save_tokenizer(train_tokenizer(["abc " * 50], vocab_size=262), folder / "tokenizer")
    rng = np.random.default_rng(0)
    for split, documents in (("train", 60), ("heldout", 4)):
        lengths = rng.integers(10, 40, documents)
        pieces = [(rng.integers(1, 90) + 7 * np.arange(n)) % 90 + 1 for n in lengths]
        arrays = TokenArrays(
            tokens=np.concatenate(pieces).astype(np.uint16),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            kinds=np.zeros(documents, np.int8),
            chat=np.zeros(documents, bool),
        )
        (folder / split).mkdir()
        _save_tokens(folder / split, arrays, {"weights": {"t0": 1.0}})
    return folder


@pytest.fixture
def one_device(monkeypatch):
    """The device count of a process is fixed once JAX has started: leave it alone."""
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)


def pretrain(monkeypatch, data: Path, out: Path, run_config: PretrainConfig) -> list[dict]:
    """Runs the program with `run_config` and returns its metrics."""
    monkeypatch.setattr("train.pretrain.load_config", lambda name, overrides: run_config)
    argv = ["x", "--data", str(data), "--out", str(out), "--json", str(out / "result.json")]
    assert main(argv) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_learns_and_writes_a_target(monkeypatch, data, tmp_path, one_device):
    log = pretrain(monkeypatch, data, tmp_path / "run", config(12))
    assert [row["step"] for row in log] == list(range(1, 13))
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    assert 0 < log[-1]["bpb_t0"] < 20
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["log"] == log and result["config"]["loop"]["steps"] == 12
    assert result["model"] == str(tmp_path / "run" / "model") and result["seconds"] > 0
    target = load_target(tmp_path / "run" / "model")
    assert target.config.moe.num_experts == 8 and target.tokenizer is not None
    logits = target(jnp.ones((1, 5), jnp.int32))
    assert logits.shape == (1, 5, 262) and bool(jnp.isfinite(logits).all())
    assert target.model.embedding[...].dtype == jnp.float32


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_losses(monkeypatch, data, tmp_path, one_device):
    whole = pretrain(monkeypatch, data, tmp_path / "whole", config(10))

    class Stopped(Exception):
        pass

    def stop_after_seven(*args, step_fn=None, **kwargs):
        def limited(state, batch, calls=[0]):  # noqa: B006
            calls[0] += 1
            if calls[0] > 7:
                raise Stopped
            return step_fn(state, batch)

        return run(*args, step_fn=limited, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("train.pretrain.run", stop_after_seven)
        with pytest.raises(Stopped):
            pretrain(patch, data, tmp_path / "cut", config(10))
    log = pretrain(monkeypatch, data, tmp_path / "cut", config(10))
    # From the checkpoint at step 4: what was written of steps 5 to 7 is replaced.
    assert [row["step"] for row in log] == list(range(1, 11))
    assert [row["loss"] for row in log] == [row["loss"] for row in whole]


def test_losses_of_the_router():
    gates = jnp.array([[[[1.0, 1.0], [3.0, 1.0]]]])
    even = gate_concentration(gates, jnp.array([[1.0, 0.0]]))
    uneven = gate_concentration(gates, jnp.array([[0.0, 1.0]]))
    assert float(even) == 0.5 and float(uneven) == pytest.approx(10 / 16)
    scores = jnp.full((1, 1, 3, 4), 0.25)
    assert float(load_balance(scores, jnp.full((1, 4), 0.25), jnp.ones((1, 3)))[0]) == 1.0
    skewed = jnp.array([[[[0.7, 0.1, 0.1, 0.1]]]])
    load = jnp.array([[1.0, 0.0, 0.0, 0.0]])
    assert float(load_balance(skewed, load, jnp.ones((1, 1)))[0]) == pytest.approx(2.8)


@pytest.mark.slow
def test_muon_takes_the_matrices_and_adamw_the_rest():
    params = {"embedding": jnp.ones((6, 4)), "up": jnp.zeros((3, 4)), "norm": jnp.ones(4)}
    rng = np.random.default_rng(0)
    gradient = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), params)
    gradient["up"] *= jnp.array([[3.0], [1.0], [0.5]])  # far from orthogonal
    optimizer = make_optimizer(OptimizerConfig("muon", 0.1, warmup_steps=0), 10)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    singular = np.linalg.svd(updates["up"], compute_uv=False)
    assert singular.min() > 0.5 * singular.max()
    sizes = np.abs(updates["embedding"])
    assert np.allclose(sizes, sizes[0, 0], rtol=1e-3)  # Adam's first step: the sign, one size


def test_the_constant_part_of_the_schedule_does_not_depend_on_the_length():
    settings = OptimizerConfig(learning_rate=1.0, warmup_steps=10, decay_steps=20)
    short, long = schedule(settings, 100), schedule(settings, 1000)
    assert [float(short(s)) for s in range(80)] == [float(long(s)) for s in range(80)]
    assert float(short(0)) == pytest.approx(0.1) and float(short(50)) == 1.0
    assert float(short(100)) == pytest.approx(settings.final_fraction)


def test_a_loss_that_is_not_finite_stops_the_run():
    def step(state, batch):
        return state, {"loss": jnp.float32(np.nan)}

    with pytest.raises(FailedError, match="step 1: loss is not finite"):
        run(
            {},
            step_fn=step,
            batch_at=lambda index: {"tokens": np.zeros((1, 2), np.int32)},
            config=LoopConfig(steps=1, log_every=1),
            label="test",
        )


@pytest.mark.parametrize("change", [{"steps": 0}, {"log_every": 0}, {"save_every": -1}])
def test_loop_settings_are_checked(change):
    with pytest.raises(UsageError, match="loop"):
        LoopConfig(**({"steps": 5} | change))


def test_a_vocabulary_too_small_for_the_data_is_refused(monkeypatch, data, tmp_path, one_device):
    small = config(2, model=MODEL | {"vocab_size": 96})
    with pytest.raises(UsageError, match="vocab_size is 96; expected at least"):
        pretrain(monkeypatch, data, tmp_path / "run", small)
    assert not (tmp_path / "run").exists()


def test_a_model_without_its_checkpoints_is_left_alone(monkeypatch, data, tmp_path, one_device):
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(UsageError, match="exists, but no checkpoint of it"):
        pretrain(monkeypatch, data, tmp_path / "run", config(2))
