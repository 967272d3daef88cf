"""Trains draft experts for a target: `dejax distill CONFIG [--set a.b=c ...] [--out DIR]`.

The target stays frozen; checkpoints, optimizer and adapter hold draft parameters alone. A stopped
run continues from its newest checkpoint, with the same batches. `--dry-run` tells what would be
trained and what memory that takes, without reading a weight. The result is `DIR/draft`, an adapter
folder.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dejax.ckpt.draft_state import check_draft_folder, save_draft
from dejax.config import DraftConfig, ModelConfig
from dejax.draft.expert import Draft, draft_of_params, random_draft
from dejax.errors import UsageError
from dejax.model import Params
from dejax.sharding import data_mesh, replicate, split_batch, unreplicate
from dejax.target import Target, load_target, load_tokenizer, model_folder
from dejax.target import load_config as load_model_config
from infer.arguments import OutputFile, OutputFolder, Positional, PositiveInt, Settings, parse
from infer.console import print_table, say
from infer.output import check_output_folder, make_folder, report
from infer.units import format_bytes
from train.closed_form import InitConfig, fit_draft
from train.config_files import load_config, to_json
from train.devices import use_cpu_devices
from train.distill_plan import plan_distillation
from train.distill_step import DistillState, Objective, make_step
from train.documents import BatchAt, Data, LossOn, check_data, open_data
from train.evaluate import teacher_forced
from train.loop import LoopConfig, Metrics, Resume, check_resume, check_seed_and_devices, run
from train.losses import LossWeights
from train.optimizer import OptimizerConfig, make_optimizer
from train.show_mask import show_mask
from train.teacher import Teacher, as_teacher


@dataclass(frozen=True)
class DistillConfig:
    """A distillation.

    Attributes:
      target: a model folder, or tiny; data: documents (JSON lines, Parquet, what `dejax generate
      --json` wrote, or hub:NAME), a folder written by `python -m train.data`, or demo; loss_on:
      which tokens count, all or what the assistant says; text_column: the column that has the text;
      draft: shape of the draft experts (none: as wide as a routed expert); init: what they start
      from; losses: weights of the four; objective: `all`, or `residual-local` (the cheap first
      stage); seq_len, batch_size: shape of a batch; dtype: what the target's weights are held in;
      remat: recompute layers in the backward pass, for less memory; cpu_devices: where there is no
      accelerator, split batches over so many devices.
    """

    target: str = "tiny"
    data: str = "demo"
    loss_on: LossOn = "all"
    text_column: str = "text"
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
        if self.seq_len * self.batch_size >= 2**31:
            raise UsageError(
                f"seq_len is {self.seq_len} and batch_size {self.batch_size}; expected less than "
                "2^31 tokens a batch"
            )
        check_seed_and_devices(self.seed, self.cpu_devices)


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
      batch_at: step -> packed rows (`Data.batch_at`), of one shape.
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
    steps, step_done = config.loop.steps, None
    if workdir is not None:
        step_done = check_resume(workdir, run_info, resume=resume, steps=steps)
    optimizer = make_optimizer(config.optimizer, steps)
    if step_done is not None:  # what is loaded replaces it
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
        training=to_json(config) | {"steps": steps},
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


def open_rows(config: DistillConfig, target: Target) -> Data:
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

    config: Positional[str]
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
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


ABOUT = """Train draft experts for a target. A config's data is documents as JSON lines (maybe
.gz) or Parquet, with text, messages, prompt and completion, or what `dejax generate --json` wrote:
a file, a folder, a pattern, or hub:NAME of Hugging Face; or a folder written by `python -m
train.data`; or demo, dejax's own documents."""


def main(argv: list[str]) -> int:
    """Runs `dejax distill`."""
    about = " ".join(ABOUT.split())
    args = parse(Arguments, argv, prog="dejax distill", description=about)
    config = load_config(args.config, args.set)
    if not isinstance(config, DistillConfig):
        raise UsageError(f"config {args.config}: makes a {type(config).__name__}, no DistillConfig")
    use_cpu_devices(config.cpu_devices)
    check_data(config.data)
    if args.show_mask is not None:
        show_mask(
            config.data,
            load_tokenizer(model_folder(config.target)),
            most=args.show_mask,
            loss_on=config.loss_on,
            text_column=config.text_column,
            json=args.json,
        )
        return 0
    if args.dry_run:
        plan = _plan(config)
        report(args.json, plan, lambda: _show_plan(config.target, plan))
        return 0
    out = args.out or Path("runs") / Path(args.config).stem
    check_output_folder(out)
    result = _train(config, out, resume=args.resume == "auto")
    report(args.json, result, lambda: _show(result))
    return 0


def _train(config: DistillConfig, out: Path, *, resume: bool) -> dict[str, Any]:
    """Distills as configured, saves the draft under `out`, and tells how it went."""
    folder = model_folder(config.target)
    _check_shape(config, load_model_config(folder))
    check_draft_folder(out / "draft")
    say(f"loading {config.target}")
    target = load_target(config.target, dtype=config.dtype)
    data = open_rows(config, target)
    target_config, teacher = target.config, as_teacher(target)
    del target  # its arrays are copied: not held twice while training

    def evaluate(params: Params) -> Metrics:
        top_r = draft_config(config, teacher.config).top_r
        metrics = teacher_forced(teacher, params, data.held_out, r=top_r)
        return {f"heldout_{name}": value for name, value in metrics.items()}

    make_folder(out)
    started = time.perf_counter()
    draft, log = distill(
        teacher,
        data.batch_at,
        config,
        workdir=out,
        resume=resume,
        evaluate=evaluate if data.held_out else None,
    )
    result = {
        "draft": save_draft(out / "draft", draft, target_config),
        "target": teacher.identity,
        "config": to_json(config),
        "seconds": time.perf_counter() - started,
        "log": log,
    }
    if data.held_out:
        result["heldout"] = evaluate(draft.stacked_params())
    return result


def _show(result: dict[str, Any]) -> None:
    if "heldout" not in result:
        print(f"{result['draft']}: written; the data left no text to hold out")
        return
    names = ("kl", "agreement", "router_agreement", "prefetch_recall")
    row = [result["heldout"][f"heldout_{name}"] for name in names]
    print_table(f"{result['draft']}: held-out text", names, [row])


def _plan(config: DistillConfig) -> dict[str, int]:
    """Parameters, tokens and memory of a run, without reading a weight."""
    model = load_model_config(model_folder(config.target))
    _check_shape(config, model)
    return plan_distillation(
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


def _show_plan(target: str, plan: dict[str, int]) -> None:
    rows = []
    for name, value in plan.items():
        words = name.replace("_", " ").removesuffix(" bytes")
        shown = format_bytes(value) if name.endswith("_bytes") else f"{value:,}"
        rows.append((f"memory: {words}" if name.endswith("_bytes") else words, shown))
    print_table(f"plan: draft experts for {target}", ("what", "how much"), rows)
