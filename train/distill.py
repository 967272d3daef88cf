"""Trains draft experts for a target: `dejax distill CONFIG [--set a.b=c ...] [--out DIR]`.

The target stays frozen; checkpoints, optimizer and adapter hold draft parameters alone. A stopped
run continues from its newest checkpoint, with the same batches. `--dry-run` tells what would be
trained and what memory that takes, without reading a weight. The result is `DIR/draft`, an adapter
folder. On several hosts every process runs the same command with `--distributed`. A config may also
make a `HealConfig`: then a MoE is healed (`train.heal`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dejax.ckpt.draft_state import check_draft_folder, save_draft
from dejax.config import ModelConfig
from dejax.draft.expert import Draft, draft_of_params, random_draft
from dejax.errors import UsageError
from dejax.model import Params
from dejax.sharding import draft_shardings, make_mesh, on_host, own_rows, place, place_rows
from dejax.target import Target, load_tokenizer, model_folder, read_outline
from dejax.target import load_config as load_model_config
from infer.argument_types import Config, OutputFile, OutputFolder, Positional, PositiveInt, Settings
from infer.arguments import parse
from infer.console import print_table
from infer.output import check_output_folder, check_room, make_folder, report
from infer.prompts import Speaker
from train.checkpoints import check_resume
from train.closed_form import fit_draft
from train.config_files import load_config, to_json
from train.devices import Distributed, start_devices
from train.distill_config import DistillConfig, check_shape, draft_config, loss_options
from train.distill_measures import best_draft, check_prompts, held_out, measures_of
from train.distill_plan import (
    DRAFTS_LESS_MEMORY,
    check_memory,
    plan_distillation,
    show_plan,
    written_bytes,
)
from train.documents import BatchAt, Data, check_data, open_data
from train.flops import peak_flops, step_flops
from train.gradient_step import DistillState, make_step, make_term_norms
from train.heal import LESS_MEMORY, plan_healing, run_healing, show_result
from train.heal_config import HealConfig, check_models
from train.kv_mix import draw_blocks
from train.loop import Measure, Metrics, Resume, run
from train.optimizer import make_optimizer
from train.show_mask import show_mask
from train.teacher import Teacher, as_teacher, drafting, load_teacher

__all__ = ["DistillConfig", "distill", "draft_config", "initial_draft", "open_rows"]


def initial_draft(teacher: Teacher, batch_at: BatchAt, config: DistillConfig) -> Params:
    """Stacked draft parameters to start from (DraftExpert's copied neurons; see `InitConfig`)."""
    draft = draft_config(config, teacher.config)
    count = -(-config.init.tokens // (config.batch_size * config.seq_len))
    rows = own_rows(teacher.mesh, config.batch_size)
    batches = (batch_at(step, rows) for step in range(count))
    params, _ = fit_draft(
        teacher,
        [place_rows(batch, teacher.mesh, config.batch_size) for batch in batches],
        width=draft.width,
        r=draft.top_r,
        config=config.init,
    )
    return params


def distill(
    target: Target | Teacher,
    batch_at: BatchAt,
    config: DistillConfig,
    *,
    workdir: Path | None = None,
    resume: bool = True,
    measures: Sequence[Measure] = (),
    initial: Params | None = None,
    data: str = "",
) -> tuple[Draft, list[Metrics]]:
    """Trains draft experts and returns them with the metrics log.

    Args:
      target: the target, or one laid out by `as_teacher` or `load_teacher`, on whose mesh it runs.
      batch_at: step -> packed rows (`Data.batch_at`), of one shape.
      workdir: where checkpoints and metrics go; None keeps everything in memory.
      resume: continue from the newest checkpoint in `workdir`.
      initial: stacked draft parameters to start from; None makes them with `initial_draft`.
      measures: what else is measured on the way, of a `DistillState`.
      data: the data's fingerprint, which a resumed run must find again.

    Raises:
      UsageError: `workdir` holds the checkpoints of another target, of another configuration or
        data, or (without `resume`) any.
      FailedError: a loss is not finite, or the run was told to stop.
    """
    teacher = as_teacher(target)
    mesh = teacher.mesh
    check_shape(config, teacher.config, mesh)
    draft = draft_config(config, teacher.config)
    teacher = drafting(teacher, draft)
    run_info = _run_info(teacher.identity, config, data)
    steps, step_done = config.loop.steps, None
    if workdir is not None:
        step_done = check_resume(workdir, run_info, resume=resume, steps=steps)
    if step_done is not None:  # what is loaded replaces it
        params = random_draft(teacher.config, draft, seed=0, identity="").stacked_params()
    else:
        params = initial_draft(teacher, batch_at, config) if initial is None else initial
    optimizer = make_optimizer(config.optimizer, steps)
    options = loss_options(config, teacher.config)
    options |= dict(definition=teacher.definition, dtype=teacher.dtype)
    step = make_step(optimizer, accumulate=config.accumulate, ema=config.ema, **options)

    def step_on_mesh(state: DistillState, placed: Any) -> Any:
        with jax.set_mesh(mesh):  # no longer than this: what is measured may run without one
            return step(teacher.params, state, *placed)

    state, log = run(
        _initial_state(params, optimizer, config, mesh),
        step_fn=step_on_mesh,
        batch_at=partial(_step_rows, batch_at, config, own_rows(mesh, config.batch_size)),
        place=lambda rows: (place_rows(rows[0], mesh, config.batch_size), rows[1]),
        config=config.loop,
        label="distill",
        workdir=workdir,
        resume=resume,
        measures=[*_norms(teacher, batch_at, config, options), *measures],
        run_info=run_info,
        tokens_per_step=lambda _: config.batch_size * config.seq_len,
        rates=partial(_rates, step_flops(teacher.config, draft, config.seq_len).total),
    )
    made = partial(
        draft_of_params,
        layers=teacher.config.moe_layers,
        top_r=draft.top_r,
        gates=draft.gates,
        identity=teacher.identity,
        training=to_json(config) | {"steps": steps},
    )
    trained = made(jax.tree.map(jnp.asarray, on_host(best_draft(state))))
    if state.average is not None:
        last = made(jax.tree.map(jnp.asarray, on_host(state.draft)))
        trained = replace(trained, raw=last.experts)
    return trained, log


def _initial_state(params: Params, optimizer: Any, config: DistillConfig, mesh: Any) -> Any:
    """Draft parameters, optimizer and average on the mesh; copied, as training donates them."""
    host = on_host(params)
    average = host if config.ema else None
    shapes = DistillState(
        draft=host, opt_state=jax.eval_shape(optimizer.init, host), average=average
    )
    shardings = draft_shardings(shapes, mesh, split=config.split_draft)
    placed = place(host, shardings.draft)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(placed)
    kept = place(host, shardings.average) if config.ema else None
    return DistillState(draft=placed, opt_state=opt_state, average=kept)


def _step_rows(batch_at: BatchAt, config: DistillConfig, rows: range, step: int) -> Any:
    """This process's rows of a step's batch, and the step's loss weights."""
    batch = dict(batch_at(step, rows))
    if config.kv == "mixed":
        block, seed = config.kv_block, config.seed
        batch["blocks"] = draw_blocks(rows, config.seq_len, block=block, seed=seed, step=step)
    return batch, config.loss_weights(step)


def _norms(
    teacher: Teacher, batch_at: BatchAt, config: DistillConfig, options: dict[str, Any]
) -> list[Measure]:
    """The gradient norm of each loss by itself, always on the first batch."""
    if not config.loop.norms_every or config.objective != "all":
        return []
    rows = own_rows(teacher.mesh, config.batch_size)
    norms = make_term_norms(accumulate=config.accumulate, **options)

    def measure(state: DistillState) -> Metrics:
        batch, _ = _step_rows(batch_at, config, rows, 0)
        placed = place_rows(batch, teacher.mesh, config.batch_size)
        with jax.set_mesh(teacher.mesh):
            found = jax.device_get(norms(teacher.params, state.draft, placed))
        return {name: float(value) for name, value in found.items()}

    return [Measure(config.loop.norms_every, measure)]


def _rates(flops_per_token: float, tokens_per_second: float) -> Metrics:
    """Operations a second of a device, and their share of its peak where that is known."""
    achieved = flops_per_token * tokens_per_second / jax.device_count()
    peak = peak_flops(jax.devices()[0])
    return {"tflops_per_device": achieved / 1e12} | ({"mfu": achieved / peak} if peak else {})


def _run_info(identity: str, config: DistillConfig, data: str) -> dict[str, Any]:
    """What a run is known by."""
    return {"target": identity, "config": to_json(config)} | ({"data": data} if data else {})


@dataclass(frozen=True)
class Unread:
    """A target of which no weight has been read, for what its configuration and tokenizer tell."""

    name: str
    config: ModelConfig
    tokenizer: Any


def open_rows(config: DistillConfig, target: Speaker) -> Data:
    """The rows that `config.data` names, as `train.documents` opens them for this target."""
    return open_data(
        config.data,
        target.tokenizer,
        vocab_size=target.config.vocab_size,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        loss_on=config.loss_on,
        text_column=config.text_column,
    )


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax distill`."""

    config: Positional[Config]
    """A config file, or the name of one that comes with dejax, such as distill_tiny."""
    set: Settings = ()
    """Settings to change, such as target=DIR, data=FILE.jsonl or loop.steps=300."""
    out: OutputFolder | None = None
    """Folder for the draft, checkpoints and metrics; runs/CONFIG unless given."""
    resume: Resume = "auto"
    """auto continues from the newest checkpoint in OUT, if there is one; none refuses to."""
    dry_run: bool = False
    """Print what would be trained and the memory it takes, and stop."""
    show_mask: PositiveInt | None = None
    """Print so many documents token by token, with what counts in the losses, and stop."""
    distributed: Distributed = "none"
    """One of several processes: auto (SLURM, Kubernetes, TPU pods), or HOST:PORT,COUNT,INDEX."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


ABOUT = """Train draft experts for a target, or heal an upcycled one. A config's data is documents
as JSON lines (maybe .gz) or Parquet, with text, messages, prompt and completion, or what `dejax
generate --json` wrote: a file, a folder, a pattern, or hub:NAME of Hugging Face; or a folder
written by `python -m train.data`; or demo, dejax's own documents."""


def main(argv: list[str]) -> int:
    """Runs `dejax distill`."""
    about = " ".join(ABOUT.split())
    args = parse(Arguments, argv, prog="dejax distill", description=about)
    config = load_config(args.config, args.set)
    if not isinstance(config, DistillConfig | HealConfig):
        raise UsageError(
            f"config {args.config}: makes a {type(config).__name__}, no DistillConfig or HealConfig"
        )
    check_data(config.data)
    if args.show_mask is not None:
        show_mask(
            config.data,
            load_tokenizer(model_folder(config.target)),
            most=args.show_mask,
            loss_on=config.loss_on,
            text_column=config.text_column,
            vocab_size=load_model_config(model_folder(config.target)).vocab_size,
            json=args.json,
        )
        return 0
    start_devices(config.cpu_devices, args.distributed)
    mesh = make_mesh(config.mesh)
    if isinstance(config, HealConfig):
        check_models(config, mesh)
    else:
        check_shape(config, load_model_config(model_folder(config.target)), mesh)
    if args.dry_run:
        _plan(config, mesh, args.json)
        return 0
    out = args.out or Path("runs") / Path(args.config).stem
    check_output_folder(out)
    resume = args.resume == "auto"
    if isinstance(config, HealConfig):
        result, show = run_healing(config, mesh, out, resume=resume), show_result
    else:
        check_room(out, written_bytes(load_model_config(model_folder(config.target)), config))
        result, show = _train(config, mesh, out, resume=resume), _show
    if jax.process_index() == 0:
        report(args.json, result, lambda: show(result))
    return 0


def _plan(config: DistillConfig | HealConfig, mesh: Any, json: Path | None) -> None:
    """Tells what would be trained, and refuses what there is no memory for."""
    if isinstance(config, HealConfig):
        plan, what = plan_healing(config, mesh), f"healing of {config.target}"
    else:
        model = load_model_config(model_folder(config.target))
        plan, what = plan_distillation(model, config, mesh), f"draft experts for {config.target}"
    report(json, plan, lambda: show_plan(what, plan))
    check_memory(plan, LESS_MEMORY if isinstance(config, HealConfig) else DRAFTS_LESS_MEMORY)


def _train(config: DistillConfig, mesh: Any, out: Path, *, resume: bool) -> dict[str, Any]:
    """Distills as configured, saves the draft under `out`, and tells how it went."""
    check_draft_folder(out / "draft")
    outline = read_outline(config.target)
    tokenizer = load_tokenizer(model_folder(config.target))
    unread = Unread(outline.name, outline.config, tokenizer)
    check_prompts(config, unread)
    data = open_rows(config, unread)
    info = _run_info(outline.identity, config, data.fingerprint)
    check_resume(out, info, resume=resume, steps=config.loop.steps, tell=False)
    teacher = load_teacher(config.target, mesh, dtype=config.dtype, compute=config.compute)
    teacher = drafting(teacher, draft_config(config, teacher.config))
    measures = measures_of(teacher, data, config)
    make_folder(out)
    started = time.perf_counter()
    draft, log = distill(
        teacher,
        data.batch_at,
        config,
        workdir=out,
        resume=resume,
        measures=measures,
        data=data.fingerprint,
    )
    result = {"target": teacher.identity, "config": to_json(config), "log": log}
    result["seconds"] = time.perf_counter() - started
    if data.held_out:
        result["heldout"] = held_out(teacher, data, config, draft.stacked_params())
    if jax.process_index() == 0:
        result["draft"] = save_draft(out / "draft", draft, teacher.config)
    return result


def _show(result: dict[str, Any]) -> None:
    if "heldout" not in result:
        print(f"{result['draft']}: written; the data left no text to hold out")
        return
    names = ("kl", "agreement", "router_agreement", "prefetch_recall")
    row = [result["heldout"][f"heldout_{name}"] for name in names]
    print_table(f"{result['draft']}: held-out text", names, [row])
