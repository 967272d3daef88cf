"""Pretrains a small MoE: `dejax pretrain configs/pretrain_tiny.py --data DIR --out DIR`.

Every routed product is dropless. The result is an ordinary Hugging Face folder; checkpoints and
metrics stay beside it, so that a stopped run continues where it was.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dejax import families
from dejax.ckpt.hf_weights import write_checkpoint
from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.model import Transformer, logits_of
from dejax.paths import kind_of
from dejax.pytree import pytree
from dejax.sharding import add_shards, make_mesh, per_shard, place_rows, replicated
from dejax.target import load_target
from infer.argument_types import Config, InputFolder, OutputFile, OutputFolder, Positional, Settings
from infer.arguments import parse
from infer.console import print_table
from infer.output import make_folder, report
from train.checkpoints import check_resume
from train.config_files import load_config, to_json
from train.data import Phase, heldout_rows, make_stream
from train.devices import use_cpu_devices
from train.loop import LoopConfig, Measure, Metrics, Resume, check_seed_and_devices, run
from train.losses import cross_entropy, gate_concentration, load_balance
from train.optimizer import OptimizerConfig, make_optimizer
from train.stacked import (
    StackedDef,
    StackedParams,
    expert_counts,
    forward,
    load_shares,
    stack_target,
    unstack_target,
)
from train.tokenizer import load_tokenizer, token_lengths


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run.

    `model` is the content of the checkpoint's `config.json`; `balance_weight` and `spread_weight`
    weigh the global load-balance loss and the gates' concentration; `start` is a model folder (or
    `tiny`) to take the first weights from, None for random ones; `cpu_devices` splits the batch
    over so many virtual devices where there is no accelerator.
    """

    model: dict[str, Any]
    phases: tuple[Phase, ...]
    optimizer: OptimizerConfig
    loop: LoopConfig
    seed: int = 0
    balance_weight: float = 0.01
    spread_weight: float = 0.0
    start: str | None = None
    cpu_devices: int = 1

    def __post_init__(self):
        check_seed_and_devices(self.seed, self.cpu_devices)


@pytree(frozen=True)
class PretrainState:
    """What a checkpoint holds: parameters and optimizer state."""

    params: StackedParams
    opt_state: Any


def init_params(config: ModelConfig, seed: int) -> tuple[StackedDef, StackedParams]:
    """Random weights: normal with variance 1 / fan-in, output projections zero."""
    model = Transformer(config, rngs=nnx.Rngs(seed))
    keys = jax.random.split(jax.random.key(seed + 1), len(config.moe_layers))
    e, f, d = config.moe.num_experts, config.moe.expert_width, config.width
    routed = {}
    for layer, key in zip(config.moe_layers, keys, strict=True):
        stack = jax.random.normal(key, (e, 3, f, d)) * d**-0.5
        routed[layer] = stack.at[:, 2].set(0)
    definition, params = stack_target(model, routed)

    def zero_outputs(path, leaf):
        name = jax.tree_util.keystr(path)
        return jnp.zeros_like(leaf) if "o_proj" in name or "down_proj" in name else leaf

    return definition, jax.tree_util.tree_map_with_path(zero_outputs, params)


def start_params(
    start: str, config: ModelConfig, tokenizer: Any
) -> tuple[StackedDef, StackedParams]:
    """The weights of an earlier run's model, in float32.

    Raises:
      UsageError: there is no such model, or it has another configuration or tokenizer.
    """
    target = load_target(start)
    if target.config != config:
        raise UsageError(f"start: {start} has another configuration than the run's `model`")
    if target.tokenizer is not None and target.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UsageError(f"start: {start} has another tokenizer than the data")
    routed = {layer: target.layer_experts(layer) for layer in config.moe_layers}
    return stack_target(target.model, routed)


def loss_fn(
    params: StackedParams,
    batch: dict[str, Array],
    *,
    definition: StackedDef,
    config: PretrainConfig,
) -> tuple[Float[Array, ""], dict[str, Float[Array, "..."]]]:
    """This shard's part of the global loss, and the global metrics of a step.

    The parts add up, over the shards of axis `data`, to the next-token loss plus the weighted
    global load-balance loss and gate concentration.
    """
    outer, x, taps = forward(definition, params, batch)
    rows = x.reshape(-1, x.shape[-1])
    total = cross_entropy(
        partial(logits_of, outer), rows, batch["targets"].reshape(-1), batch["mask"].reshape(-1)
    )
    counted = add_shards(total.count)
    experts = definition.config.moe.num_experts
    counts = add_shards(expert_counts(taps.routing.ids, batch["mask"], num_experts=experts))
    load = load_shares(counts)
    share = batch["mask"].sum() / counted
    balance = share * load_balance(taps.routing.scores, load, batch["mask"]).mean()
    spread = share * gate_concentration(taps.routing.gates, batch["mask"])
    loss = total.sum / jnp.maximum(counted, 1)
    metrics = {
        "loss": add_shards(loss),
        "balance": add_shards(balance),
        "concentration": add_shards(spread),
        "load_max": load.max() * experts,
        "load_min": load.min() * experts,
        "top1_gate": add_shards(share * taps.routing.gates[..., 0].mean()),
    }
    return loss + config.balance_weight * balance + config.spread_weight * spread, metrics


def _tree(params: StackedParams) -> Any:
    """The parameters as optax sees them: any pytree (its types know no dataclasses)."""
    return params


def make_step(
    definition: StackedDef,
    optimizer: optax.GradientTransformation,
    config: PretrainConfig,
    mesh: Mesh,
):
    """The jitted training step (state donated): data-parallel over `mesh`."""

    def gradients(params: StackedParams, batch: dict[str, Array]):
        loss = partial(loss_fn, definition=definition, config=config)
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return add_shards(grads), metrics

    sharded = per_shard(gradients, mesh)

    @partial(jax.jit, donate_argnums=0)
    def step(state: PretrainState, batch):
        grads, metrics = sharded(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, _tree(state.params))
        params = cast(StackedParams, optax.apply_updates(_tree(state.params), updates))
        metrics["grad_norm"] = optax.tree.norm(grads)
        return PretrainState(params=params, opt_state=opt_state), metrics

    return step


def bits_per_byte(
    definition: StackedDef,
    params: StackedParams,
    tokens_dir: Path,
    *,
    byte_lengths: np.ndarray,
    seq_len: int,
    most: int,
    batch: int = 16,
) -> dict[str, float]:
    """Held-out bits per byte by kind of text, over at most `most` rows of each kind."""

    @jax.jit
    def row_nll(params, rows):
        outer, x, _ = forward(definition, params, rows)
        flat = x.reshape(-1, x.shape[-1])
        targets, mask = rows["targets"].reshape(-1), rows["mask"].reshape(-1)
        return cross_entropy(partial(logits_of, outer), flat, targets, mask).sum

    by_kind: dict[str, list] = {}
    for kind, row in heldout_rows(tokens_dir, seq_len, most=most):
        by_kind.setdefault(kind, []).append(row)
    result = {}
    for kind, rows in by_kind.items():
        nats = 0.0
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            blank = [{k: np.zeros_like(v) for k, v in part[0].items()}] * (batch - len(part))
            stacked = {k: np.stack([row[k] for row in [*part, *blank]]) for k in part[0]}
            nats += float(row_nll(params, stacked))
        counted = np.concatenate([row["targets"][row["mask"] > 0] for row in rows])
        result[f"bpb_{kind}"] = nats / np.log(2) / byte_lengths[counted].sum()
    return result


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax pretrain`."""

    config: Positional[Config]
    """A config file, or the name of one that comes with dejax, such as pretrain_tiny."""
    data: InputFolder
    """Folder of tokenizer and tokens, written by `python -m train.data`."""
    out: OutputFolder
    """Folder for the model, its checkpoints and metrics."""
    set: Settings = ()
    """Settings to change, such as loop.steps=300 or optimizer.learning_rate=0.002."""
    resume: Resume = "auto"
    """auto continues from the newest checkpoint in OUT, if there is one; none refuses to."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


def main(argv: list[str]) -> int:
    """Runs `dejax pretrain`."""
    about = "Train a small MoE from random weights or from another model's."
    args = parse(Arguments, argv, prog="dejax pretrain", description=about)
    config = load_config(args.config, args.set)
    if not isinstance(config, PretrainConfig):
        kind = type(config).__name__
        raise UsageError(f"config {args.config}: makes a {kind}, no PretrainConfig")
    info, steps = to_json(config), config.loop.steps
    found = check_resume(args.out, info, resume=args.resume == "auto", steps=steps)
    if found is None and kind_of(args.out / "model"):
        raise UsageError(f"{args.out / 'model'}: exists, but no checkpoint of it; give another OUT")
    stream = make_stream(args.data, config.phases, seed=config.seed)
    tokenizer = load_tokenizer(args.data / "tokenizer")
    lengths = token_lengths(tokenizer)
    use_cpu_devices(config.cpu_devices)
    mesh = make_mesh()
    model_config = families.model_config(config.model)
    if len(tokenizer) > model_config.vocab_size:
        raise UsageError(
            f"model.vocab_size is {model_config.vocab_size}; expected at least the data's "
            f"{len(tokenizer)} tokens"
        )
    if config.start is None:
        definition, params = init_params(model_config, config.seed)
    else:
        definition, params = start_params(config.start, model_config, tokenizer)
    optimizer = make_optimizer(config.optimizer, steps)
    state = PretrainState(params=params, opt_state=optimizer.init(_tree(params)))
    state = jax.device_put(state, replicated(mesh))
    make_folder(args.out)

    def evaluate(state: PretrainState) -> Metrics:
        return bits_per_byte(
            definition, state.params, args.data, byte_lengths=lengths, seq_len=256, most=48
        )

    began = time.perf_counter()
    state, log = run(
        state,
        step_fn=make_step(definition, optimizer, config, mesh),
        batch_at=stream.batch_at,
        place=lambda batch: place_rows(batch, mesh, len(batch["tokens"])),
        config=config.loop,
        label="pretrain",
        workdir=args.out,
        resume=True,
        measures=[Measure(config.loop.eval_every, evaluate)],
        run_info=info,
    )
    model, routed = unstack_target(definition, state.params)
    write_checkpoint(
        args.out / "model",
        config.model,
        model,
        routed,
        dtype=jnp.bfloat16,
        tokenizer=args.data / "tokenizer",
        replace=True,
    )
    seconds = time.perf_counter() - began
    result = {"model": args.out / "model", "config": info, "seconds": seconds, "log": log}
    report(args.json, result, lambda: _show(result["model"], log))
    return 0


def _show(model: Path, log: list[Metrics]) -> None:
    """Where the model is, and the last figures of the log, if there was anything left to train."""
    names = ("step", "loss", *(name for name in (log[-1] if log else {}) if name[:4] == "bpb_"))
    rows = [[row[name] for name in names] for row in log[-1:]]
    print_table(f"{model}: written", names, rows, "bpb: held-out bits a byte" if rows else "")
