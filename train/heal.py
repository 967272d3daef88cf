"""Heals an upcycled MoE: `dejax distill heal_smol --set target=MOE dense=DENSE data=TEXT.jsonl`.

The dense model that it was made from is the teacher, of which nothing changes; of the MoE the
configured parts are trained, by the loop that trains draft experts. The result is `OUT/model`, an
ordinary checkpoint like the one that was healed, with `healing.json`, which tells how it was made.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dejax
from dejax.ckpt.hf_weights import read_json
from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.model import Params
from dejax.paths import kind_of, shown
from dejax.sharding import on_host, own_rows, place_rows, row_sharding, target_shardings
from dejax.target import check_dtype, model_folder
from infer.console import print_table
from infer.output import make_folder
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
from train.loop import Measure, Metrics, check_resume, run
from train.losses import add_up
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


def heal(
    dense: Teacher,
    moe: Teacher,
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
      dense, moe: both models, on one mesh; the MoE's weights in float32.
      batch_at, workdir, resume, data: as `train.distill.distill` takes them.
      measures: what else is measured on the way, of a `HealState`.

    Raises:
      UsageError: `workdir` holds the checkpoints of other models, of another configuration or data,
        or (without `resume`) any.
      FailedError: a loss is not finite, or the run was told to stop.
    """
    mesh, steps = moe.mesh, config.loop.steps
    info = {"target": moe.identity, "dense": dense.identity, "config": to_json(config)}
    info |= {"data": data} if data else {}
    if workdir is not None:
        check_resume(workdir, info, resume=resume, steps=steps)
    optimizer = make_optimizer(config.optimizer, steps)
    trained, frozen = split_trained(moe.params, config.trained)
    constants = Constants(frozen=frozen, dense=dense.params)
    step = make_step(
        optimizer,
        accumulate=config.accumulate,
        balance_weight=config.balance_weight,
        **_options(config, dense, moe),
    )
    with jax.set_mesh(mesh):
        state, log = run(
            _initial_state(trained, optimizer, mesh),
            step_fn=lambda state, batch: step(constants, state, batch),
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


def _options(config: HealConfig, dense: Teacher, moe: Teacher) -> dict[str, Any]:
    """The options of `train.heal_step.compare_models`."""
    return dict(
        models=Models(dense=dense.definition, moe=moe.definition),
        temperature=config.temperature,
        dtype=moe.dtype,
        remat=config.remat,
    )


def _initial_state(trained: Params, optimizer: Any, mesh: Any) -> Any:
    """Copies of what is trained, as training donates them, and the optimizer, on the mesh."""
    shapes = jax.eval_shape(optimizer.init, trained)
    opt_state = jax.jit(optimizer.init, out_shardings=target_shardings(shapes, mesh))(trained)
    return HealState(trained=jax.tree.map(jnp.copy, trained), opt_state=opt_state)


def make_measure(
    dense: Teacher, moe: Teacher, held_out: Sequence[Batch], config: HealConfig
) -> Any:
    """trained -> how near the MoE is to the dense model on held-out rows, and how its load lies.

    Names begin with `heldout_`: kl (nats a token), agreement (share of tokens with the same most
    likely successor), next_token and dense_next_token (nats), load (the busiest expert's load over
    the mean, averaged over layers), load_max (in the worst layer), unused (share of experts that no
    token chose).
    """
    frozen = split_trained(moe.params, config.trained)[1]
    constants = Constants(frozen=frozen, dense=dense.params)
    totals = make_totals(**_options(config, dense, moe))

    def of_batch(trained: Params, batch: Batch) -> Any:
        with jax.set_mesh(moe.mesh):
            rows = own_rows(moe.mesh, config.batch_size)
            own = {key: array[rows.start : rows.stop] for key, array in batch.items()}
            return totals(constants, trained, place_rows(own, moe.mesh, config.batch_size))

    def measure(trained: Params) -> Metrics:
        sums = add_up(of_batch(trained, batch) for batch in held_out)
        load = np.asarray(sums.pop("load").mean) * moe.config.moe.num_experts
        found = {name: float(total.mean) for name, total in sums.items()}
        found |= {"load": float(load.max(axis=-1).mean()), "load_max": float(load.max())}
        found["unused"] = float((load == 0).mean())
        return {f"heldout_{name}": value for name, value in found.items()}

    return measure


def open_rows(config: HealConfig, moe: Teacher) -> Data:
    """The rows that `config.data` names, of held-out ones at most `config.eval_rows`."""
    data = open_data(
        config.data,
        moe.tokenizer,
        vocab_size=moe.config.vocab_size,
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
    moe = load_teacher(config.target, mesh, compute=config.compute)
    dense = load_dense(config.dense, mesh, dtype=config.dtype, compute=config.compute)
    check_tokenizers(dense.tokenizer, moe.tokenizer)
    data = open_rows(config, moe)
    make_folder(out)
    started = time.perf_counter()
    measure = make_measure(dense, moe, data.held_out, config)
    start = split_trained(moe.params, config.trained)[0]
    measured = Measure(config.loop.eval_every, lambda state: measure(state.trained))
    trained, log = heal(
        dense,
        moe,
        data.batch_at,
        config,
        workdir=out,
        resume=resume,
        measures=[measured] if data.held_out else [],
        data=data.fingerprint,
    )
    raw = read_json(model_folder(config.target) / "config.json")
    dtype = check_dtype(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    result: dict[str, Any] = {
        "target": moe.identity,
        "dense": dense.identity,
        "config": to_json(config),
        "trained_params": count_params(trained),
        "data": data.fingerprint,
        "dejax": dejax.__version__,
    }
    if data.held_out:  # of what is written: in the folder's dtype
        written = jax.tree.map(lambda a: a.astype(dtype).astype(a.dtype), trained)
        result |= {"before": measure(start), "heldout": measure(written)}
    _write(out / "model", moe, trained, config, raw, dtype, result)
    seconds = time.perf_counter() - started
    return result | {"model": out / "model", "seconds": seconds, "log": log}


def _write(
    out: Path,
    moe: Teacher,
    trained: Params,
    config: HealConfig,
    raw: dict[str, Any],
    dtype: Any,
    record: dict[str, Any],
) -> None:
    """The healed MoE as a folder, by the first process."""
    params = on_host(join_trained(trained, split_trained(moe.params, config.trained)[1]))
    if jax.process_index() == 0:
        model, routed = unstack_target(moe.definition, params)
        source, named = model_folder(config.target), (RECORD, record)
        write_model_folder(
            out, raw, model, routed, dtype=dtype, source=source, record=named, replace=True
        )


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
        models=Models(dense=dense_def, moe=moe_def),
        temperature=config.temperature,
        dtype=jnp.dtype(config.compute),
        remat=config.remat,
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
