"""A dense model becomes a fine-grained MoE: `dejax upcycle DENSE --out DIR`.

No gradient descent. Layer by layer, the neurons of the feed-forward are dealt out to shared and
routed experts (`train.upcycle_split`), a linear router is fitted to predict which experts' outputs
are long, and the down projections are fitted anew so that what is routed, gates included, comes as
near to the dense model's states as it can (`train.upcycle_fit`). Experts are fitted on the states
that the MoE itself has reached by then, which drift from the dense model's.

The result is a checkpoint of the family `glm4_moe`. Stopped runs go on where they were: the same
command again. At the end both models are compared on text that was not fitted on.
"""

import hashlib
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np

from dejax import families
from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.paths import kind_of, shown
from dejax.target import Target, is_gguf, load_target
from infer.argument_types import (
    InputFile,
    NonNegativeInt,
    OutputFile,
    OutputFolder,
    ParsedBy,
    Positional,
    PositiveInt,
    not_empty,
)
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.output import report
from infer.units import format_bytes
from train.model_folder import write_model_folder
from train.rows import Batch
from train.upcycle_layers import (
    BATCH,
    FOLDS,
    Windows,
    dense_layer,
    upcycle_layer,
)
from train.upcycle_measure import Numbers, compare
from train.upcycle_state import Options, Unfinished, finished_layers
from train.upcycle_target import (
    Layout,
    assemble,
    choose_layout,
    dense_config,
    raw_config,
)
from train.upcycle_text import LONGEST_WINDOW, calibration_windows, check_apart, held_out_windows

Source = Annotated[str, ParsedBy(not_empty, "DENSE")]


@dataclass(frozen=True)
class Effort:
    """How much is done.

    Attributes:
      tokens: of calibration text; windows: of each kind to measure on, at most; arms: of them, to
      compare draft paths on.
    """

    tokens: int
    windows: int
    arms: int


EFFORTS = {False: Effort(tokens=57344, windows=4, arms=1), True: Effort(16384, 2, 1)}
"""By `--fast`."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax upcycle`."""

    dense: Positional[Source]
    """A Hugging Face folder of a dense llama or qwen3, or a .gguf file of a llama."""
    out: OutputFolder
    """Folder to write; DIR.unfinished beside it holds a run that was stopped."""
    shared: PositiveInt | None = None
    """Neurons a layer that are always on; a quarter unless given."""
    experts: PositiveInt | None = None
    """Routed experts that the other neurons are dealt out to; as many as fit unless given."""
    top_k: PositiveInt | None = None
    """Routed experts of a token; half of them unless given."""
    first_dense: PositiveInt = 1
    """Leading layers that stay dense."""
    calibration: tuple[InputFile, ...] = ()
    """Documents to fit on beside the demo's, as JSON lines ({"text": ...} or {"messages": [...]}
    a line, maybe with its kind); kinds get equal shares."""
    tokens: PositiveInt | None = None
    """Calibration tokens; 57344 unless given."""
    fast: bool = False
    """Fit on 16384 tokens and measure on half of the text: about a third of the time."""
    correct: bool = True
    """Fit the down projections anew; without it only routers are fitted."""
    held_out: tuple[InputFile, ...] = ()
    """Documents to measure on, in place of the demo's held-out ones; never fitted on."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What weights are written in."""
    seed: NonNegativeInt = 0
    """Seed of the text's order and of the grouping of neurons."""
    json: OutputFile | None = None
    """Write the results here as JSON; - is standard output."""

    @property
    def effort(self) -> Effort:
        """What `--fast` and `--tokens` come to."""
        chosen = EFFORTS[self.fast]
        return Effort(self.tokens or chosen.tokens, chosen.windows, chosen.arms)


# --- the run ---------------------------------------------------------------------------------


def read_calibration(dense: Target, args: Arguments) -> tuple[Batch, int]:
    """The calibration windows, and how many go through a layer together."""
    window = min(LONGEST_WINDOW, dense.config.context)
    rows = max(1, min(BATCH, args.effort.tokens // (FOLDS * window)))
    batch = calibration_windows(
        dense.tokenizer,
        args.calibration,
        tokens=args.effort.tokens,
        window=window,
        multiple=FOLDS * rows,
        seed=args.seed,
    )
    return batch, rows


def options_of(dense: Target, layout: Layout, args: Arguments, batch: Batch) -> Options:
    """All that the result depends on."""
    text = hashlib.sha256(b"".join(batch[key].tobytes() for key in ("tokens", "positions")))
    return {
        "DENSE": dense.identity,
        "--shared": layout.shared,
        "--experts": layout.experts,
        "--top-k": layout.top_k,
        "--first-dense": layout.first_dense,
        "--seed": args.seed,
        "--correct": args.correct,
        "--dtype": args.dtype,
        "--tokens": int(batch["tokens"].size),
        "the calibration text": text.hexdigest()[:16],
    }


def start_windows(dense: Target, batch: Batch, rows: int, dtype: Any) -> Windows:
    """Both residual streams before the first layer."""
    embedding = np.asarray(dense.model.embedding[...])
    short = np.asarray(dense.model.embedding[...].astype(dtype))
    tokens = batch["tokens"]
    return Windows(batch, rows, embedding[tokens], short[tokens].astype(np.float32))


def fit_layers(
    dense: Target,
    config: ModelConfig,
    windows: Windows,
    state: Unfinished,
    *,
    dtype: Any,
    correct: bool,
    seed: int,
) -> None:
    """Takes all layers that are left, one after another, each kept as soon as it is fitted."""
    count, first = config.num_layers, state.restore(windows)
    if first:
        say(f"going on after {first} of {count} layers")
    with progress("fitting", count, "layers", done=first) as bar:
        for index in range(first, count):
            layer = dense.model.layers[index]
            if index not in config.moe_layers:
                dense_layer(layer, windows, dtype)
                state.finish_layer(index, windows, None, None)
                bar.advance(1)
                continue
            routed, found = upcycle_layer(
                layer,
                index,
                windows,
                config,
                dtype=dtype,
                correct=correct,
                seed=seed,
                advance=bar.advance,
            )
            state.finish_layer(index, windows, routed, found)


def write_moe(
    dense: Target, raw: dict[str, Any], state: Unfinished, out: Path, *, source: str, dtype: Any
) -> None:
    """Writes the checkpoint of finished layers, tokenizer included."""
    config = families.model_config(raw)
    layers = {layer: state.read_layer(layer)[0] for layer in config.moe_layers}
    model, stacks = assemble(dense.model, config, layers, dtype)
    beside = dense.tokenizer if is_gguf(source) else Path(source)
    write_model_folder(out, raw, model, stacks, dtype=dtype, source=beside)


def check_vocabulary(dense: Target) -> None:
    """Refuses a model without a tokenizer, or with one that it has not enough tokens for."""
    if dense.tokenizer is None:
        raise UsageError(f"{dense.name} has no tokenizer; expected one, the calibration is text")
    if len(dense.tokenizer) > dense.config.vocab_size:
        raise UsageError(
            f"{dense.name}: the tokenizer has {len(dense.tokenizer)} tokens, the model "
            f"{dense.config.vocab_size}; expected the tokenizer that it was trained with"
        )


def upcycle(args: Arguments) -> Numbers:
    """Upcycles a dense model; continues where an earlier call was stopped.

    Raises:
      UsageError: the model, the layout, the text or what is there already does not fit.
    """
    began = time.perf_counter()
    config = dense_config(args.dense)
    # A run that is stopped while it measures has written its folder already.
    written = kind_of(args.out) is not None
    if written and finished_layers(args.out) < config.num_layers:
        raise UsageError(f"{shown(args.out)} exists already; remove it or choose another folder")
    layout = choose_layout(
        config.dense_width,
        config.num_layers,
        shared=args.shared,
        experts=args.experts,
        top_k=args.top_k,
        first_dense=args.first_dense,
    )
    say(f"loading {args.dense}")
    dense, dtype = load_target(args.dense), jnp.dtype(args.dtype)
    check_vocabulary(dense)
    check_apart(args.calibration, args.held_out)
    batch, rows = read_calibration(dense, args)
    options = options_of(dense, layout, args, batch)
    held_out = held_out_windows(
        dense.tokenizer,
        args.held_out,
        window=batch["tokens"].shape[1],
        most=args.effort.windows,
    )
    state = Unfinished(args.out, options)
    windows = start_windows(dense, batch, rows, dtype)
    raw = raw_config(config, layout)
    fit_layers(
        dense,
        families.model_config(raw),
        windows,
        state,
        dtype=dtype,
        correct=args.correct,
        seed=args.seed,
    )
    if not written:
        write_moe(dense, raw, state, args.out, source=args.dense, dtype=dtype)
    fitted = time.perf_counter() - began
    moe = load_target(args.out, args.dtype)
    measured = compare(dense, moe, held_out, arms=args.effort.arms)
    fits = [state.read_layer(layer)[1] for layer in moe.config.moe_layers]
    state.remove()
    return {
        "out": args.out,
        "identity": moe.identity,
        "dense": dense.name,
        "options": options,
        "layout": asdict(layout) | {"active_share": layout.active_share},
        "layers": fits,
        "fit_seconds": fitted,
        **measured,
        "seconds": time.perf_counter() - began,
        "peak_memory_bytes": peak_memory(),
    }


def peak_memory() -> int:
    """The most memory that this process has had, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # Linux counts in KiB


# --- the program -----------------------------------------------------------------------------

QUALITY = ("dense_perplexity", "perplexity", "kl", "agreement", "tokens")


def main(argv: list[str]) -> int:
    """Runs `dejax upcycle`."""
    about = "Turn a dense model into a fine-grained mixture of experts, without training."
    args = parse(Arguments, argv, prog="dejax upcycle", description=about)
    done = upcycle(args)
    report(args.json, done, lambda: show(done))
    return 0


def show(done: Numbers) -> None:
    """Prints the tables of a result."""
    layout = done["layout"]
    note = f"{layout['shared']} shared neurons, {layout['experts']} experts of {layout['width']}, "
    note += f"top-{layout['top_k']}: {layout['active_share']:.1%} active; "
    note += f"{done['seconds']:.0f} s, {format_bytes(done['peak_memory_bytes'])} of memory"
    rows = [[kind, *(row[key] for key in QUALITY)] for kind, row in done["quality"].items()]
    columns = ["text", "dense perplexity", "perplexity", "KL", "agreement", "tokens"]
    print_table(f"{done['out']}: beside {done['dense']}", columns, rows, note)
    kept = done["draft_agreement"]
    names = ["shared only" if r == 0 else f"+ top-{r}" for r in kept]
    print_table("draft paths: agreement with the full MoE", names, [list(kept.values())])
    routing = done["routing"]
    rows = [
        ["load, busiest / mean", *_mean_and_worst(routing["load_max_over_mean"])],
        ["overlap of neighbours", *_mean_and_worst(routing["overlap"])],
        ["... drawn independently", *_mean_and_worst(routing["independent_overlap"])],
    ]
    print_table("routing over layers", ["", "mean", "largest"], rows)


def _mean_and_worst(values: Sequence[float]) -> list[float]:
    return [float(np.mean(values)), float(np.max(values))]
