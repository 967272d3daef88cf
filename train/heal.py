"""Heals an upcycled MoE: `dejax distill heal_smol --set target=MOE dense=DENSE data=TEXT.jsonl`.

The dense model that it was made from is the teacher, of which nothing changes; of the MoE the
configured parts are trained, by the loop that trains draft experts. The result is `OUT/model`, an
ordinary checkpoint like the one that was healed, with `healing.json`, which tells how it was made.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import dejax
from dejax.ckpt.hf_weights import read_json
from dejax.errors import UsageError
from dejax.model import Params
from dejax.paths import kind_of, shown
from dejax.sharding import on_host, own_rows, place_rows, row_sharding, target_shardings
from dejax.target import check_dtype, model_folder
from infer.console import print_table
from infer.output import make_folder
from train.checkpoints import check_resume
from train.config_files import to_json
from train.distill_plan import abstract_batch, count_params, device_bytes, lying, step_bytes
from train.documents import BatchAt, Data, open_data
from train.heal_config import HealConfig, check_models, check_tokenizers
from train.heal_step import (
    Constants,
    HealState,
    Models,
    join_trained,
    make_step,
    make_totals,
    split_trained,
)
from train.loop import Measure, Metrics, run
from train.losses import Total, add_up
from train.model_folder import write_model_folder
from train.optimizer import make_optimizer
from train.stacked import unstack_target
from train.teacher import Teacher, abstract_target, load_dense, load_teacher
from train.update import Batch

RECORD = "healing.json"
"""File of the result that tells how it was made."""

LESS_MEMORY = {
    "target_bytes": "split the models over more devices (mesh.fsdp), or hold the dense one in "
    "dtype=bfloat16",
    "state_bytes": "train less (trained=routers,norms), or split it over more devices (mesh.fsdp)",
    "step_bytes": "set remat=layer, accumulate, or a smaller batch_size or seq_len",
    "batch_bytes": "set a smaller batch_size",
}
"""What helps where a part of the memory is the largest (`train.distill_plan.check_memory`)."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A dense model and the MoE that it teaches, on one mesh.

    Attributes:
      models: their static side; constants: all that is frozen; start: the weights to be trained, as
      the MoE came with them (`HealState.trained`); dtype: of activations; identities: of both;
      tokenizer: the MoE's.
    """

    models: Models
    constants: Constants
    start: Params
    mesh: Any
    dtype: Any
    identities: dict[str, str]
    tokenizer: Any


def pair_models(dense: Teacher, moe: Teacher, config: HealConfig) -> Pair:
    """Both models, laid out on one mesh, with the MoE (float32) split as configured.

    Raises:
      UsageError: their tokenizers have other tokens.
    """
    check_tokenizers(dense.tokenizer, moe.tokenizer)
    start, frozen = split_trained(moe.params, config.trained)
    return Pair(
        models=Models(dense=dense.definition, moe=moe.definition),
        constants=Constants(frozen=frozen, dense=dense.params),
        start=start,
        mesh=moe.mesh,
        dtype=moe.dtype,
        identities={"target": moe.identity, "dense": dense.identity},
        tokenizer=moe.tokenizer,
    )


def load_pair(config: HealConfig, mesh: Any) -> Pair:
    """The models that the configuration names, on a mesh."""
    moe = load_teacher(config.target, mesh, compute=config.compute)
    dense = load_dense(config.dense, mesh, dtype=config.dtype, compute=config.compute)
    return pair_models(dense, moe, config)


def heal(
    pair: Pair,
    batch_at: BatchAt,
    config: HealConfig,
    *,
    workdir: Path | None = None,
    resume: bool = True,
    measures: Sequence[Measure] = (),
    data: str = "",
) -> tuple[Params, list[Metrics]]:
    """Trains the configured parts of a MoE; what is trained (`HealState.trained`), and the log.

    Args:
      batch_at, workdir, resume, data: as `train.distill.distill` takes them.
      measures: what else is measured on the way, of a `HealState`.

    Raises:
      UsageError: `workdir` holds the checkpoints of other models, of another configuration or data,
        or (without `resume`) any.
      FailedError: a loss is not finite, or the run was told to stop.
    """
    mesh, steps = pair.mesh, config.loop.steps
    info = pair.identities | {"config": to_json(config)} | ({"data": data} if data else {})
    if workdir is not None:
        check_resume(workdir, info, resume=resume, steps=steps)
    optimizer = make_optimizer(config.optimizer, steps)
    step = make_step(
        optimizer,
        accumulate=config.accumulate,
        balance_weight=config.balance_weight,
        **_options(config, pair.models, pair.dtype),
    )
    with jax.set_mesh(mesh):
        state, log = run(
            _initial_state(pair.start, optimizer, mesh),
            step_fn=lambda state, batch: step(pair.constants, state, batch),
            batch_at=lambda index: batch_at(index, own_rows(mesh, config.batch_size)),
            place=lambda rows: place_rows(rows, mesh, config.batch_size),
            config=config.loop,
            label="heal",
            workdir=workdir,
            resume=resume,
            measures=measures,
            run_info=info,
            tokens_per_step=lambda _: config.batch_size * config.seq_len,
        )
    return state.trained, log


def _options(config: HealConfig, models: Models, dtype: Any) -> dict[str, Any]:
    """The options of `train.heal_step.compare_models`."""
    return dict(models=models, temperature=config.temperature, dtype=dtype, remat=config.remat)


def _initial_state(start: Params, optimizer: Any, mesh: Any) -> Any:
    """Copies of what is trained, as training donates them, and the optimizer, on the mesh."""
    shapes = jax.eval_shape(optimizer.init, start)
    opt_state = jax.jit(optimizer.init, out_shardings=target_shardings(shapes, mesh))(start)
    return HealState(trained=jax.tree.map(jnp.copy, start), opt_state=opt_state)


def make_measure(
    pair: Pair, held_out: Sequence[Batch], config: HealConfig
) -> Callable[[Params], Metrics]:
    """trained -> how near the MoE is to the dense model on held-out rows, and how its load lies.

    Names begin with `heldout_`: kl (nats a token), agreement (share of tokens with the same most
    likely successor), next_token and dense_next_token (nats), load (the busiest expert's load over
    the mean, averaged over layers), load_max (in the worst layer), unused (share of experts that no
    token chose).
    """
    totals = make_totals(**_options(config, pair.models, pair.dtype))
    rows = own_rows(pair.mesh, config.batch_size)

    def of_batch(trained: Params, batch: Batch) -> dict[str, Total]:
        own = {key: array[rows.start : rows.stop] for key, array in batch.items()}
        placed = place_rows(own, pair.mesh, config.batch_size)
        with jax.set_mesh(pair.mesh):
            return totals(pair.constants, trained, placed)

    def measure(trained: Params) -> Metrics:
        sums = add_up(of_batch(trained, batch) for batch in held_out)
        load, tokens = sums.pop("load"), sums["kl"].count
        load = load.sum / load.count * pair.models.moe.config.moe.num_experts
        found = {name: float(total.sum / total.count) for name, total in sums.items()}
        found |= {"load": load.max(axis=-1).mean(), "load_max": load.max()}
        found |= {"unused": (load == 0).mean(), "tokens": tokens}
        return {f"heldout_{name}": float(value) for name, value in found.items()}

    return measure


def open_rows(config: HealConfig, pair: Pair) -> Data:
    """The rows that `config.data` names, of held-out ones at most `config.eval_rows`."""
    data = open_data(
        config.data,
        pair.tokenizer,
        vocab_size=pair.models.moe.config.vocab_size,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        loss_on=config.loss_on,
        text_column=config.text_column,
    )
    most = -(-config.eval_rows // config.batch_size)
    return Data(data.batch_at, data.held_out[:most], data.fingerprint)


def run_healing(config: HealConfig, mesh: Any, out: Path, *, resume: bool) -> dict[str, Any]:
    """Heals as configured, writes `out`/model, and tells how it went.

    Raises:
      UsageError: models, data or what is in `out` do not fit.
    """
    if kind_of(out / "model") and kind_of(out / "checkpoints") != "folder":
        raise UsageError(
            f"{shown(out / 'model')}: exists, but no checkpoint of it; give another --out"
        )
    pair = load_pair(config, mesh)
    data = open_rows(config, pair)
    make_folder(out)
    started = time.perf_counter()
    measure = make_measure(pair, data.held_out, config)
    measured = Measure(config.loop.eval_every, lambda state: measure(state.trained))
    trained, log = heal(
        pair,
        data.batch_at,
        config,
        workdir=out,
        resume=resume,
        measures=[measured] if data.held_out else [],
        data=data.fingerprint,
    )
    raw = read_json(model_folder(config.target) / "config.json")
    dtype = check_dtype(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    record = pair.identities | {
        "config": to_json(config),
        "data": data.fingerprint,
        "trained_params": count_params(trained),
        "dejax": dejax.__version__,
    }
    if data.held_out:  # of what is written: in the folder's dtype
        written = jax.tree.map(lambda a: a.astype(dtype).astype(a.dtype), trained)
        record |= {"before": measure(pair.start), "heldout": measure(written)}
    weights = on_host((trained, pair.constants.frozen))
    if jax.process_index() == 0:
        weights = jax.device_put(weights, jax.local_devices(backend="cpu")[0])
        write_model_folder(
            out / "model",
            raw,
            *unstack_target(pair.models.moe, join_trained(*weights)),
            dtype=dtype,
            source=model_folder(config.target),
            record=(RECORD, record),
            replace=True,
        )
    seconds = time.perf_counter() - started
    return record | {"model": out / "model", "seconds": seconds, "log": log}


def show_result(result: dict[str, Any]) -> None:
    """Prints what a healing came to."""
    if "heldout" not in result:
        print(f"{result['model']}: written; the data left no text to hold out")
        return
    names = ("kl", "agreement", "next_token", "dense_next_token", "load", "load_max")
    rows = [
        [what, *(result[key][f"heldout_{name}"] for name in names)]
        for what, key in (("before", "before"), ("healed", "heldout"))
    ]
    columns = ["", "KL", "agreement", "next token", "dense", "load", "worst load"]
    note = "next token, dense: nats; load: busiest expert over the mean"
    print_table(f"{result['model']}: held-out text", columns, rows, note)


def plan_healing(config: HealConfig, mesh: Any) -> dict[str, Any]:
    """Counts, and bytes of each device by part, as `plan_distillation` has them; no weight is read.

    `target_bytes` are the frozen weights, the dense model's and the MoE's.
    """
    dense, moe = check_models(config, mesh)
    dense_def, dense_params = abstract_target(dense, jnp.dtype(config.dtype))
    moe_def, params = abstract_target(moe, jnp.float32)
    trained, frozen = jax.eval_shape(partial(split_trained, parts=config.trained), params)
    optimizer = make_optimizer(config.optimizer, config.loop.steps)
    state: Any = HealState(trained=trained, opt_state=jax.eval_shape(optimizer.init, trained))
    batch: Any = abstract_batch(config.batch_size, config.seq_len)
    constants: Any = Constants(frozen=frozen, dense=dense_params)
    arguments = (
        lying(constants, target_shardings(constants, mesh)),
        lying(state, target_shardings(state, mesh)),
        lying(batch, jax.tree.map(lambda _: row_sharding(mesh), batch)),
    )
    step = make_step(
        optimizer,
        accumulate=config.accumulate,
        balance_weight=config.balance_weight,
        **_options(config, Models(dense=dense_def, moe=moe_def), jnp.dtype(config.compute)),
    )
    return {
        "trained_params": count_params(trained),
        "frozen_params": count_params(frozen),
        "dense_params": count_params(dense_params),
        "tokens": config.loop.steps * config.batch_size * config.seq_len,
        "devices": mesh.size,
        "target_bytes": device_bytes(arguments[0]),
        "state_bytes": device_bytes(arguments[1]),
        "batch_bytes": device_bytes(arguments[2]),
        "step_bytes": step_bytes(step, arguments, mesh),
    }
