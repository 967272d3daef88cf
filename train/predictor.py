"""Trains a predictor of experts for mode ecospec.

    python -m train.predictor --target TARGET --draft DRAFT --out DIR [--data DATA] [--json FILE]

The predictor (`dejax.draft.predictor`) tells which experts a drafted token will need before any
pass was run over it. Target and draft experts stay frozen. DIR gets `predictor.safetensors`, which
`--predictor` of `dejax generate` takes, and checkpoints and metrics: a stopped run continues from
the newest one. At the end the recall of all predictors is measured, on the same rounds of decoding
the prompts that come with dejax.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.ckpt.draft_state import draft_identity, resolve_draft
from dejax.ckpt.predictor_file import FILE, save_predictor
from dejax.cli import run_module
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor, initial_predictor
from dejax.model import Params
from dejax.pytree import pytree
from dejax.sharding import draft_shardings, make_mesh, on_host, own_rows, place, place_rows
from dejax.target import load_target, load_tokenizer, model_folder, read_outline
from infer.argument_types import (
    DraftSpec,
    Model,
    NonNegativeInt,
    OutputFile,
    OutputFolder,
    PositiveFloat,
    PositiveInt,
)
from infer.arguments import parse
from infer.console import print_table, say
from infer.decoder import Decoder
from infer.expert_recall import NAMES, prediction_cost, recall_by_depth
from infer.output import check_output_folder, make_folder, report
from infer.prompts import DEMO_PROMPTS, encode_prompts, read_prompts
from infer.units import format_percent
from train.checkpoints import check_resume
from train.config_files import to_json
from train.distill_config import check_rows, check_sizes
from train.documents import BatchAt, Data, check_data, open_data
from train.kv_mix import draw_blocks
from train.loop import LoopConfig, Measure, Metrics, Resume, check_seed_and_devices, run
from train.losses import Total, add_up
from train.optimizer import OptimizerConfig, make_optimizer
from train.predictor_step import candidates_of, predictor_loss, predictor_totals
from train.teacher import Teacher, drafting, load_teacher
from train.update import Batch, update

RANK, NEW_TOKENS = 256, 48
"""The rank of wide targets, and new tokens a prompt in the measured rounds."""
HELD_OUT_BLOCKS = 10**6
"""The step as whose rows held-out ones are cut into blocks: one that no training has."""
CALIBRATED = (("ece", "predicted", "needed"), ("ece_chosen", "chosen", "chosen_needed"))


@dataclass(frozen=True)
class PredictorConfig:
    """The training of a predictor.

    Attributes:
      rank: as `ExpertPredictor`; kv_block: tokens of a block (`train.kv_mix`), so the depths that
      are trained on; the others as `train.distill_config.DistillConfig`.
    """

    target: str
    rank: int
    data: str = "demo"
    kv_block: int = 4
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig(steps=400)
    seq_len: int = 256
    batch_size: int = 8
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self):
        check_sizes(self, "rank", "seq_len", "batch_size", "kv_block")
        check_seed_and_devices(self.seed, 1)


@pytree(frozen=True)
class PredictorState:
    """What a checkpoint holds: the predictor and the optimizer's state."""

    predictor: Params
    opt_state: Any


@partial(jax.jit, static_argnames=("definition", "r", "dtype"))
def _batch_totals(
    definition: Any, params: Any, draft: Params, predictor: Params, batch: Batch, **options: Any
) -> dict[str, Total]:
    return predictor_totals(predictor, candidates_of(definition, params, draft, batch, **options))


def held_out(
    teacher: Teacher, draft: Draft, predictor: Params, batches: Sequence[Batch], *, block: int
) -> Metrics:
    """Loss, recall at k and calibration on held-out rows; nothing where there are none.

    `ece` is the expected calibration error, the mean distance of predicted probability and share of
    experts needed over bins of probability, of all layer-experts; `ece_chosen` that of the
    predicted top-k.
    """

    def totals(place_: int, batch: Batch) -> dict[str, Total]:
        rows, length = batch["tokens"].shape
        step = HELD_OUT_BLOCKS + place_
        blocks = draw_blocks(range(rows), length, block=block, seed=0, step=step)
        mine = own_rows(teacher.mesh, rows)
        part = {name: a[mine.start : mine.stop] for name, a in (batch | {"blocks": blocks}).items()}
        with jax.set_mesh(teacher.mesh):
            return _batch_totals(
                teacher.definition,
                teacher.params,
                draft.stacked_params(),
                predictor,
                place_rows(part, teacher.mesh, rows),
                r=draft.config.top_r,
                dtype=teacher.dtype,
            )

    sums = add_up(totals(place_, batch) for place_, batch in enumerate(batches))
    if not sums:
        return {}
    found = {f"heldout_{name}": float(np.divide(*sums[name])) for name in ("loss", "recall")}
    for name, told, needed in CALIBRATED:
        wrong = np.abs(sums[told].sum - sums[needed].sum).sum()
        found[f"heldout_{name}"] = float(wrong / max(sums[told].count.sum(), 1))
    return found


def train_predictor(
    teacher: Teacher,
    draft: Draft,
    batch_at: BatchAt,
    config: PredictorConfig,
    *,
    workdir: Path | None = None,
    resume: bool = True,
    measures: Sequence[Measure] = (),
    data: str = "",
) -> tuple[ExpertPredictor, list[Metrics]]:
    """Trains a predictor and returns it with the metrics log.

    Args:
      teacher: the target that `draft` is for (`load_teacher`), on whose mesh it runs.
      batch_at: step -> packed rows (`Data.batch_at`), of one shape.
      workdir, resume, measures, data: as `train.distill.distill`.

    Raises:
      UsageError: `workdir` holds the checkpoints of another run, or (without `resume`) any.
      FailedError: the loss is not finite, or the run was told to stop.
    """
    mesh = teacher.mesh
    check_rows(config, teacher.config, mesh)
    teacher = drafting(teacher, draft.config)
    info = _run_info(teacher.identity, draft, config, data)
    if workdir is not None:
        check_resume(workdir, info, resume=resume, steps=config.loop.steps)
    optimizer = make_optimizer(config.optimizer, config.loop.steps)
    first = initial_predictor(teacher.config, rank=config.rank, seed=config.seed)
    shapes = PredictorState(predictor=first, opt_state=jax.eval_shape(optimizer.init, first))
    shardings = draft_shardings(shapes, mesh, split=False)
    placed = place(first, shardings.predictor)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(placed)
    step = _make_step(optimizer, teacher, draft)
    rows = own_rows(mesh, config.batch_size)

    def step_rows(at: int) -> Batch:
        blocks = dict(block=config.kv_block, seed=config.seed, step=at)
        return batch_at(at, rows) | {"blocks": draw_blocks(rows, config.seq_len, **blocks)}

    state, log = run(
        PredictorState(predictor=placed, opt_state=opt_state),
        step_fn=step,
        batch_at=step_rows,
        place=lambda batch: place_rows(batch, mesh, config.batch_size),
        config=config.loop,
        label="predictor",
        workdir=workdir,
        resume=resume,
        measures=measures,
        run_info=info,
        tokens_per_step=lambda _: config.batch_size * config.seq_len,
    )
    return _predictor_of(state, teacher, draft, config), log


def _predictor_of(
    state: PredictorState, teacher: Teacher, draft: Draft, config: PredictorConfig
) -> ExpertPredictor:
    return ExpertPredictor(
        params=jax.tree.map(jnp.asarray, on_host(state.predictor)),
        layers=teacher.config.moe_layers,
        target=teacher.identity,
        draft=draft_identity(draft),
        training=to_json(config),
    )


def _make_step(optimizer: Any, teacher: Teacher, draft: Draft) -> Callable[..., Any]:
    """(state, batch) -> (state, metrics) on the teacher's mesh; the state is donated."""
    options: Any = dict(r=draft.config.top_r, dtype=teacher.dtype)

    @partial(jax.jit, donate_argnums=2)
    def step(params, stacked, state: PredictorState, batch: Batch):
        def loss(predictor, batch):
            found = candidates_of(teacher.definition, params, stacked, batch, **options)
            return predictor_loss(predictor, found)

        predictor, opt_state, metrics = update(
            optimizer, loss, state.predictor, state.opt_state, batch
        )
        return PredictorState(predictor=predictor, opt_state=opt_state), metrics

    stacked = draft.stacked_params()

    def on_mesh(state: PredictorState, batch: Batch) -> Any:
        with jax.set_mesh(teacher.mesh):
            return step(teacher.params, stacked, state, batch)

    return on_mesh


def _run_info(identity: str, draft: Draft, config: PredictorConfig, data: str) -> dict[str, Any]:
    """What a run is known by."""
    info = {"target": identity, "draft": draft_identity(draft), "config": to_json(config)}
    return info | ({"data": data} if data else {})


@dataclass(frozen=True)
class Arguments:
    """Arguments of the training."""

    draft: DraftSpec
    """Draft experts that the predictor is for; it works with these alone."""
    out: OutputFolder
    """Folder for the predictor, checkpoints and metrics."""
    target: Model = "tiny"
    """A Hugging Face folder, a converted folder, or tiny."""
    data: str = "demo"
    """Documents, as for `dejax distill`: a file, a folder, hub:NAME, or the demo's."""
    rank: PositiveInt | None = None
    """Numbers that state and token are brought down to; 256 unless given, or the width if less."""
    steps: PositiveInt = 400
    """Steps of training."""
    learning_rate: PositiveFloat = 1e-2
    """Largest learning rate."""
    seq_len: PositiveInt | None = None
    """Tokens of a row of text; 256 unless given, or the target's context if that is less."""
    batch_size: PositiveInt = 8
    """Rows of a batch."""
    seed: NonNegativeInt = 0
    """Seed of first weights, of the order of the text and of its blocks."""
    resume: Resume = "auto"
    """auto continues from the newest checkpoint in OUT, if there is one; none refuses to."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


def main(argv: list[str]) -> int:
    """Runs the training."""
    about = "Train a predictor of the experts that drafted tokens will need (mode ecospec)."
    args = parse(Arguments, argv, prog="python -m train.predictor", description=about)
    check_data(args.data)
    outline = read_outline(args.target)
    draft = resolve_draft(args.draft, outline)
    steps = args.steps
    config = PredictorConfig(
        target=args.target,
        rank=args.rank or min(RANK, outline.config.width),
        data=args.data,
        optimizer=OptimizerConfig(
            learning_rate=args.learning_rate, warmup_steps=10, decay_steps=steps // 2
        ),
        loop=LoopConfig(steps=steps, eval_every=max(1, steps // 4), save_every=max(1, steps // 4)),
        seq_len=args.seq_len or min(256, outline.config.context),
        batch_size=args.batch_size,
        seed=args.seed,
    )
    check_output_folder(args.out)
    mesh = make_mesh()
    check_rows(config, outline.config, mesh)
    data = open_data(
        config.data,
        load_tokenizer(model_folder(args.target)),
        vocab_size=outline.config.vocab_size,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    info = _run_info(outline.identity, draft, config, data.fingerprint)
    check_resume(args.out, info, resume=args.resume == "auto", steps=steps, tell=False)
    teacher = drafting(load_teacher(args.target, mesh), draft.config)
    make_folder(args.out)
    result, predictor = _train(teacher, draft, data, config, args.out, args.resume == "auto")
    del teacher  # the decode holds a target of its own
    result |= measured(args.target, draft, predictor)
    report(args.json, result, lambda: _show(result))
    return 0


def _train(
    teacher: Teacher, draft: Draft, data: Data, config: PredictorConfig, out: Path, resume: bool
) -> tuple[dict[str, Any], ExpertPredictor]:
    """Trains as configured, saves the predictor under `out`, and tells how it went."""

    def score(params: Params) -> Metrics:
        return held_out(teacher, draft, params, data.held_out, block=config.kv_block)

    began = time.perf_counter()
    predictor, log = train_predictor(
        teacher,
        draft,
        data.batch_at,
        config,
        workdir=out,
        resume=resume,
        measures=[Measure(config.loop.eval_every, lambda state: score(state.predictor))],
        data=data.fingerprint,
    )
    result = {
        "file": save_predictor(out / FILE, predictor),
        "config": to_json(config),
        "parameters": predictor.size,
        "seconds": time.perf_counter() - began,
        "heldout": score(predictor.params),
        "log": log,
    }
    return result, predictor


def measured(path: str, draft: Draft, predictor: ExpertPredictor) -> dict[str, Any]:
    """Recall on rounds of decoding, where the target reads the prompts, and what a guess costs."""
    target = load_target(path)
    prompts: list[list[int]] = []
    if target.tokenizer is not None:
        fits = target.config.context - NEW_TOKENS
        records = read_prompts(DEMO_PROMPTS)
        encoded = encode_prompts(target, records, chat=True, on_bad=lambda *_: None)
        prompts = [ids for _, ids in encoded if len(ids) <= fits]
    if not prompts:
        say(
            f"{target.name}: reads none of the prompts that come with dejax; recall is not measured"
        )
    with Decoder(target, draft=draft, predictor=predictor) as decoder:
        found = recall_by_depth(decoder, prompts, max_new_tokens=NEW_TOKENS)
        assert decoder.engine.predictor is not None
        return {"recall": found, "cost": prediction_cost(decoder.engine.predictor)}


def _show(result: dict[str, Any]) -> None:
    scores = result["heldout"]
    told = ", ".join(
        f"{name.removeprefix('heldout_')} {value:.4f}" for name, value in scores.items()
    )
    rows = [
        [row["nodes"], row["depth"], row["count"], *(format_percent(row[name]) for name in NAMES)]
        for row in result["recall"]
    ]
    cost = result["cost"]
    note = f"held-out text: {told or 'none'}; {result['parameters']} parameters; a prediction for "
    note += f"{cost['candidates']} nodes takes {cost['device_us']:.0f} us on the device and "
    note += f"{cost['host_us']:.0f} us on the host"
    title = f"{result['file']}: share of a node's experts that were foretold"
    print_table(title, ["nodes", "depth", "count", *NAMES], rows, note)


if __name__ == "__main__":
    sys.exit(run_module("predictor", main))
