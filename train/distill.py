"""Trains draft experts for a target: `dejax distill CONFIG [--set a.b=c ...] [--out DIR]`.

The target stays frozen; checkpoints, optimizer and adapter hold draft parameters alone. A stopped
run continues from its newest checkpoint, with the same batches. `--dry-run` tells what would be
trained and what memory that takes, without reading a weight. The result is `DIR/draft`, an adapter
folder.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dejax import families
from dejax.ckpt.draft_state import save_draft
from dejax.ckpt.tensor_files import read_json
from dejax.config import DraftConfig, ModelConfig
from dejax.draft.expert import Draft, draft_of_params, random_draft
from dejax.errors import UsageError
from dejax.model import Params
from dejax.sharding import data_mesh, replicate, split_batch, unreplicate
from dejax.target import Target, load_target, model_folder
from infer.arguments import Positional, format_bytes, parse, write_json
from infer.console import print_table
from train.closed_form import InitConfig, fit_draft
from train.config_files import load_config, to_json
from train.data import Phase, heldout_rows, make_stream
from train.devices import use_cpu_devices
from train.distill_plan import plan_distillation
from train.distill_step import Batch, DistillState, Objective, make_step
from train.evaluate import teacher_forced
from train.loop import LoopConfig, Metrics, checkpointer, run
from train.losses import LossWeights
from train.optimizer import OptimizerConfig, make_optimizer
from train.packed_rows import (
    PackedRows,
    encode_documents,
    pad_rows,
    read_documents,
    split_documents,
)
from train.teacher import Teacher, as_teacher

BatchAt = Callable[[int], Batch]
"""Training step (from 0) -> packed rows."""


@dataclass(frozen=True)
class DistillConfig:
    """A distillation.

    Attributes:
      target: a model folder, or tiny; data: documents as JSON lines, a folder written by
      `python -m train.data`, or demo; draft: shape of the draft experts (none: as wide as a routed
      expert); init: what they start from; losses: weights of the four; objective: `all`, or
      `residual-local` (the cheap first stage); seq_len, batch_size: shape of a batch; dtype: what
      the target's weights are held in; remat: recompute layers in the backward pass, for less
      memory; cpu_devices: where there is no accelerator, split batches over so many devices.
    """

    target: str = "tiny"
    data: str = "demo"
    draft: DraftConfig | None = None
    init: InitConfig = InitConfig()
    losses: LossWeights = LossWeights()
    objective: Objective = "all"
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig(steps=200)
    seq_len: int = 256
    batch_size: int = 8
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    remat: bool = False
    cpu_devices: int = 1
    seed: int = 0

    def __post_init__(self):
        if min(self.seq_len, self.batch_size) < 1:
            raise UsageError(
                f"seq_len is {self.seq_len} and batch_size {self.batch_size}; expected at least 1"
            )


def draft_config(config: DistillConfig, model: ModelConfig) -> DraftConfig:
    """The configured shape, or one routed expert's; checked against the target's."""
    draft = config.draft or DraftConfig(width=model.moe.expert_width)
    if draft.top_r > model.moe.top_k:
        raise UsageError(
            f"draft.top_r is {draft.top_r}; expected at most the {model.moe.top_k} experts "
            "that the target uses for a token"
        )
    return draft


def initial_draft(teacher: Teacher, batch_at: BatchAt, config: DistillConfig) -> Params:
    """Stacked draft parameters to start from (DraftExpert's copied neurons; see `InitConfig`)."""
    draft = draft_config(config, teacher.config)
    count = -(-config.init.tokens // (config.batch_size * config.seq_len))
    params, _ = fit_draft(
        teacher.definition,
        teacher.params,
        [jax.device_put(batch_at(step)) for step in range(count)],
        width=draft.width,
        r=draft.top_r,
        config=config.init,
        dtype=teacher.dtype,
    )
    return params


def distill(
    target: Target | Teacher,
    batch_at: BatchAt,
    config: DistillConfig,
    *,
    workdir: Path | None = None,
    resume: bool = True,
    evaluate: Callable[[Params], Metrics] | None = None,
    initial: Params | None = None,
) -> tuple[Draft, list[Metrics]]:
    """Trains draft experts and returns them with the metrics log.

    Args:
      target: the target, or one laid out by `as_teacher`.
      batch_at: step -> packed rows (`PackedRows.batch_at`, or a `BatchStream`'s), of one shape.
      workdir: where checkpoints and metrics go; None keeps everything in memory.
      resume: continue from the newest checkpoint in `workdir`.
      initial: stacked draft parameters to start from; None makes them with `initial_draft`.
      evaluate: stacked draft parameters -> metrics, called every `config.loop.eval_every` steps.

    Raises:
      UsageError: `workdir` holds the checkpoints of another target, of another configuration, or
        (without `resume`) any.
      FailedError: a loss is not finite.
    """
    teacher = as_teacher(target)
    draft = draft_config(config, teacher.config)
    run_info = {"target": teacher.identity, "config": to_json(config)}
    resumed = workdir is not None and _check_resume(workdir, run_info, resume=resume)
    optimizer = make_optimizer(config.optimizer, config.loop.steps)
    if resumed:  # what is loaded replaces it
        params = random_draft(teacher.config, draft, seed=0, identity="").stacked_params()
    else:
        params = initial_draft(teacher, batch_at, config) if initial is None else initial
        params = jax.tree.map(jnp.copy, params)  # training donates its state
    mesh = data_mesh()
    _check_shape(config, teacher.config)
    step = make_step(
        optimizer,
        mesh,
        definition=teacher.definition,
        r=draft.top_r,
        weights=config.losses,
        objective=config.objective,
        dtype=teacher.dtype,
        remat=config.remat,
    )
    state = DistillState(draft=params, opt_state=optimizer.init(params))
    state, log = run(
        replicate(state, mesh),
        step_fn=partial(step, replicate(teacher.params, mesh)),
        place=lambda batch: split_batch(batch, mesh),
        batch_at=batch_at,
        config=config.loop,
        label="distill",
        workdir=workdir,
        resume=resume,
        evaluate=None if evaluate is None else lambda s: evaluate(unreplicate(s.draft)),
        run_info=run_info,
    )
    trained = draft_of_params(
        unreplicate(state.draft),
        layers=teacher.config.moe_layers,
        top_r=draft.top_r,
        identity=teacher.identity,
        training=to_json(config) | {"steps": config.loop.steps},
    )
    return trained, log


def _check_shape(config: DistillConfig, model: ModelConfig) -> None:
    """Refuses a batch that does not fit the target's context or divide over the devices."""
    if config.seq_len > model.context:
        raise UsageError(
            f"seq_len is {config.seq_len}; expected at most the target's {model.context}"
        )
    devices = data_mesh().size
    if config.batch_size % devices:
        raise UsageError(
            f"batch_size is {config.batch_size}; expected a multiple of the {devices} devices"
        )


def _check_resume(workdir: Path, run_info: dict[str, Any], *, resume: bool) -> bool:
    """Whether there is a checkpoint to continue from; UsageError if it is not this run's."""
    if not (workdir / "checkpoints").is_dir():
        return False
    with contextlib.closing(checkpointer(workdir, 1)) as saver:
        if saver.latest is None:
            return False
        saved: Any = saver.checkpointables_metadata(saver.latest.step).custom_metadata or {}
    if not resume:
        raise UsageError(f"{workdir}: has checkpoints; resume, or choose another folder")
    if saved.get("target") != run_info["target"]:
        raise UsageError(
            f"{workdir}: its checkpoints belong to target {saved.get('target')}, not to "
            f"{run_info['target']}; choose another folder"
        )
    old, new = (dict(info.get("config") or {}) for info in (saved, run_info))
    free = ("loop", "cpu_devices")  # neither changes what a step does
    changed = [key for key in new if key not in free and old.get(key) != new[key]]
    if changed:
        was = ", ".join(f"{key} was {old.get(key)}" for key in changed)
        raise UsageError(
            f"{workdir}: its checkpoints are of another run ({was}); choose another folder"
        )
    return True


@dataclass(frozen=True)
class Data:
    """Rows of a run: `batch_at` to train on, and held-out batches (maybe none)."""

    batch_at: BatchAt
    held_out: tuple[Batch, ...]


_HELD_OUT_ROWS = 64


def open_data(config: DistillConfig, target: Target) -> Data:
    """The rows that `config.data` names, packed; of documents one in sixteen is held out.

    Raises:
      UsageError: there is no such data, or text for a target without a tokenizer.
    """
    folder, size = Path(config.data), config.batch_size
    if (folder / "train").is_dir():
        phases = [Phase(start=0, seq_len=config.seq_len, batch_size=size)]
        stream = make_stream(folder, phases, seed=config.seed)
        kinds = [row for _, row in heldout_rows(folder, config.seq_len, most=_HELD_OUT_ROWS // 8)]
        parts = [kinds[start : start + size] for start in range(0, len(kinds), size)]
        held = [{key: np.stack([r[key] for r in part]) for key in part[0]} for part in parts]
        return Data(stream.batch_at, tuple(pad_rows(batch, size) for batch in held))
    if target.tokenizer is None:
        raise UsageError(f"{target.name}: the folder has no tokenizer, and the data is text")
    trained, held_out = split_documents(read_documents(config.data))
    order = np.random.default_rng(config.seed).permutation(len(trained))
    encoded = encode_documents([trained[i] for i in order], target.tokenizer)
    rows = PackedRows(encoded, config.seq_len)
    batches: tuple[Batch, ...] = ()
    if held_out:
        others = PackedRows(encode_documents(held_out, target.tokenizer), config.seq_len)
        batches = tuple(others.batches(size, most=_HELD_OUT_ROWS))
    return Data(partial(rows.batch_at, batch_size=size, seed=config.seed), batches)


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax distill`."""

    config: Positional[str]
    """A config file, or the name of one that comes with dejax."""
    set: tuple[str, ...] = ()
    """Settings to change: a.b=c."""
    resume: Literal["auto", "none"] = "auto"
    """auto: continue from the newest checkpoint in OUT, if there is one."""
    dry_run: bool = False
    """Print what would be trained and the memory it takes, and stop."""
    out: Path | None = None
    """Where the draft, checkpoints and metrics go (default: runs/CONFIG)."""
    json: Path | None = None
    """Where the result goes as JSON; - is standard output."""


def main(argv: list[str]) -> int:
    """Runs `dejax distill`."""
    args = parse(Arguments, argv, prog="dejax distill", description="Train draft experts.")
    config = load_config(args.config, args.set)
    if not isinstance(config, DistillConfig):
        raise UsageError(f"config {args.config}: makes a {type(config).__name__}, no DistillConfig")
    use_cpu_devices(config.cpu_devices)
    if args.dry_run:
        result = _print_plan(config)
    else:
        out = args.out or Path("runs") / Path(args.config).stem
        result = _train(config, out, resume=args.resume == "auto")
    if args.json is not None:
        write_json(args.json, result)
    return 0


def _train(config: DistillConfig, out: Path, *, resume: bool) -> dict[str, Any]:
    """Distills as configured, saves the draft under `out`, and tells how it went."""
    target = load_target(config.target, dtype=config.dtype)
    _check_shape(config, target.config)
    data = open_data(config, target)
    target_config, teacher = target.config, as_teacher(target)
    del target  # its arrays are copied: not held twice while training

    def evaluate(params: Params) -> Metrics:
        top_r = draft_config(config, teacher.config).top_r
        metrics = teacher_forced(teacher, params, data.held_out, r=top_r)
        return {f"heldout_{name}": value for name, value in metrics.items()}

    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    draft, log = distill(
        teacher,
        data.batch_at,
        config,
        workdir=out,
        resume=resume,
        evaluate=evaluate if data.held_out else None,
    )
    folder = save_draft(out / "draft", draft, target_config)
    result = {
        "draft": folder,
        "target": teacher.identity,
        "config": to_json(config),
        "seconds": time.perf_counter() - started,
        "log": log,
    }
    if data.held_out:
        result["heldout"] = evaluate(draft.stacked_params())
        names = ("kl", "agreement", "router_agreement", "prefetch_recall")
        row = [result["heldout"][f"heldout_{name}"] for name in names]
        print_table(f"{folder}: held-out text", names, [row])
    return result


def _print_plan(config: DistillConfig) -> dict[str, int]:
    """Prints parameters, tokens and memory, and returns them."""
    model = families.model_config(read_json(model_folder(config.target) / "config.json"))
    _check_shape(config, model)
    if config.data != "demo" and not Path(config.data).exists():
        raise UsageError(f"{config.data}: no such data; expected JSON lines, a folder, or demo")
    plan = plan_distillation(
        model,
        draft_config(config, model),
        config.optimizer,
        steps=config.loop.steps,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        dtype=jnp.dtype(config.dtype),
        weights=config.losses,
        objective=config.objective,
        remat=config.remat,
    )
    shown = {
        name: format_bytes(value) if name.endswith("_bytes") else f"{value:,}"
        for name, value in plan.items()
    }
    rows = [[name.replace("_", " "), value] for name, value in shown.items()]
    print_table(f"plan: draft experts for {config.target}", ("what", "how much"), rows)
    return plan
