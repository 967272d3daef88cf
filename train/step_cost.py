"""What a distillation step costs beside the frozen target's forward pass, and how long it compiles.

    python -m train.step_cost [--model DIR] [--layers 4] [--tokens 1024] [--json FILE]

The model has the layers of a release, fewer of them, and random weights (simulated ones, so that
losses say nothing and times are real). Both are measured in turns, A B A B, in one process. The
floor is the ratio of floating-point operations (`train.flops`): no step can do with less than the
target's forward pass, the draft network's forward and backward pass, and the trained weights'
gradients.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dejax
from dejax.cli import run_module
from dejax.config import DraftConfig, ModelConfig
from dejax.errors import UsageError
from dejax.model import head_of
from dejax.sharding import draft_shardings, make_mesh, row_sharding, target_shardings
from dejax.target import load_config, model_folder
from infer.argument_types import Model, OutputFile, PositiveInt
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.output import report
from infer.units import format_percent
from train.devices import use_cpu_devices
from train.distill_config import DistillConfig, check_rows, draft_config
from train.distill_plan import abstract_batch, abstract_step
from train.distill_step import Remat, compare_vocabulary, paired_forward
from train.flops import step_flops
from train.gradient_step import DistillState, make_step
from train.losses import most_likely
from train.optimizer import make_optimizer
from train.stacked import forward
from train.step_profile import profile
from train.teacher import abstract_target

SHAPE = Path(dejax.__file__).parent / "assets" / "shapes" / "deepseek_v2_lite"
"""DeepSeek-V2-Lite's config.json, without weights."""


DEPTHS = (4, 24)
"""Layers at which the step is compiled, for arrays that do not exist."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.step_cost`."""

    model: Model = str(SHAPE)
    """A folder with a config.json; DeepSeek-V2-Lite's unless given. Its weights are not read."""
    layers: PositiveInt = 4
    """Layers of it to keep, the dense ones first."""
    tokens: PositiveInt = 1024
    """Tokens of a batch."""
    seq_len: PositiveInt = 256
    """Tokens of a row."""
    remat: Remat = "none"
    """What the backward pass computes again."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    repeats: PositiveInt = 3
    """Times that each is measured, in turns."""
    cpu_devices: PositiveInt = 1
    """Where there is no accelerator, show the CPU as so many devices."""
    profile: bool = False
    """Also tell where the step's time goes, by kind of operation, from JAX's profiler."""
    json: OutputFile | None = None
    """Write the results here as JSON; - is standard output."""


def cut(model: ModelConfig, layers: int) -> ModelConfig:
    """A configuration with the first layers alone.

    Raises:
      UsageError: none of them has routed experts.
    """
    if not model.moe_layers:
        raise UsageError(f"--model is a dense {model.family}; expected a mixture of experts")
    short, first = replace(model, num_layers=layers), model.moe_layers[0]
    if not short.moe_layers:
        raise UsageError(
            f"--layers is {layers}; expected at least {first + 1}: the first {first} layers of the "
            "model have no routed experts"
        )
    return short


def random_target(model: ModelConfig, dtype: str, mesh: Any) -> tuple[Any, Any]:
    """Definition and random stacked weights of a target, each layer another's copy."""
    definition, shapes = abstract_target(model, jnp.dtype(dtype))
    rng = np.random.default_rng(0)

    def fill(shape, sharding):
        layer = shape.shape[1:] if len(shape.shape) > 2 else shape.shape
        values = rng.standard_normal(layer, np.float32) * np.float32(layer[-1] ** -0.5)

        @partial(jax.jit, out_shardings=sharding)
        def repeated(values):
            return jnp.broadcast_to(values.astype(shape.dtype), shape.shape)

        return repeated(values)

    return definition, jax.tree.map(fill, shapes, target_shardings(shapes, mesh))


def random_rows(model: ModelConfig, config: DistillConfig) -> dict[str, jax.Array]:
    """A batch of random tokens, a document a row."""
    rng = np.random.default_rng(1)
    shape = (config.batch_size, config.seq_len)
    batch = {
        key: jnp.ones(s.shape, s.dtype)
        for key, s in abstract_batch(config.batch_size, config.seq_len).items()
    }
    batch["tokens"] = jnp.asarray(rng.integers(0, model.vocab_size, shape), jnp.int32)
    batch["targets"] = jnp.roll(batch["tokens"], -1, axis=1)
    batch["positions"] = jnp.broadcast_to(jnp.arange(config.seq_len, dtype=jnp.int32), shape)
    return batch


def _parts(definition: Any, params: Any, state: Any, batch: Any, step: Any, options: Any):
    """What is measured: name -> function without arguments, which returns what to wait for."""
    dtype, r = options["dtype"], options["r"]

    @jax.jit
    def target(params, batch):
        outer, x, _ = forward(definition, params, batch, dtype=dtype)
        return most_likely(head_of(outer), outer.norm(x))

    @jax.jit
    def layers_alone(params, batch):
        return forward(definition, params, batch, dtype=dtype)[1]

    @partial(jax.jit, static_argnames="compare")
    def pair(params, draft, batch, compare):
        outer, full, drafted, pairs = paired_forward(
            definition, params, draft, batch, r=r, dtype=dtype
        )
        if not compare:
            return full, drafted, pairs
        return compare_vocabulary(outer, full, drafted, batch)[0], pairs

    held = [state]

    def whole():
        held[0], metrics = step(params, held[0], batch, np.ones(4, np.float32))
        return metrics

    return {
        "target": lambda: target(params, batch),
        "step": whole,
        "target without head": lambda: layers_alone(params, batch),
        "both streams without head": lambda: pair(params, held[0].draft, batch, compare=False),
        "both streams and losses": lambda: pair(params, held[0].draft, batch, compare=True),
    }


def measure(parts: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each part, measured in turns; the first time, which compiles, is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    with progress("measure", (repeats + 1) * len(parts), "runs") as bar:
        for round_ in range(repeats + 1):
            for name, part in parts.items():
                began = time.perf_counter()
                jax.block_until_ready(part())
                if round_:
                    seconds[name].append(time.perf_counter() - began)
                bar.advance(1, part=name)
    return seconds


@contextlib.contextmanager
def _nothing_cached() -> Iterator[None]:
    """Without compilations kept on disk: reading one would be measured for compiling."""
    config: Any = jax.config  # which does not tell the names that it has
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)


def compile_seconds(model: ModelConfig, config: DistillConfig, mesh: Any) -> dict[str, Any]:
    """Seconds to trace and to compile the step, and lines of the compiled program's source."""
    began = time.perf_counter()
    _, step, arguments = abstract_step(model, config, mesh)
    with jax.set_mesh(mesh):
        lowered = step.lower(*arguments)
        traced = time.perf_counter()
        lowered.compile()
    done = time.perf_counter()
    return {
        "layers": model.num_layers,
        "trace_seconds": traced - began,
        "compile_seconds": done - traced,
        "lines": len(lowered.as_text().splitlines()),
    }


def step_cost(
    model: ModelConfig, config: DistillConfig, *, repeats: int, profiled: bool = False
) -> dict[str, Any]:
    """Seconds of the parts of a step (medians), the step's ratio to the target's, and its floor.

    With `profiled`, also where its time goes (`train.step_profile`).
    """
    mesh = make_mesh(config.mesh)
    draft = draft_config(config, model)
    definition, params = random_target(model, config.dtype, mesh)
    optimizer = make_optimizer(config.optimizer, config.loop.steps)
    shape = (len(model.moe_layers), 3, draft.width, model.width)
    weights = {"weights": jnp.full(shape, 1e-3, jnp.float32), "gamma": jnp.ones(shape[0])}
    state: Any = DistillState(draft=weights, opt_state=optimizer.init(weights))
    state = jax.device_put(state, draft_shardings(state, mesh, split=False))
    options: dict[str, Any] = dict(r=draft.top_r, dtype=jnp.dtype(config.compute))
    step = make_step(optimizer, definition=definition, remat=config.remat, **options)
    with jax.set_mesh(mesh):
        batch = jax.device_put(random_rows(model, config), row_sharding(mesh))
        parts = _parts(definition, params, state, batch, step, options)
        seconds = measure(parts, repeats)
        kinds = None
        if profiled:
            text = step.lower(params, state, batch, np.ones(4, np.float32)).compile().as_text()
            kinds = profile(parts["step"], text)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    flops, tokens = step_flops(model, draft, config.seq_len), config.batch_size * config.seq_len
    ratio, floor = medians["step"] / medians["target"], flops.total / flops.target
    return {
        "seconds": medians,
        "spread": {name: max(values) - min(values) for name, values in seconds.items()},
        "ratio": ratio,
        "floor": floor,
        "ratio_to_floor": ratio / floor,
        "profile": kinds,
        "flops_per_second": {
            "target": flops.target * tokens / medians["target"],
            "step": flops.total * tokens / medians["step"],
        },
    }


def main(argv: list[str]) -> int:
    """Runs `python -m train.step_cost`."""
    about = "Measure a distillation step beside the frozen target's forward pass."
    args = parse(Arguments, argv, prog="python -m train.step_cost", description=about)
    use_cpu_devices(args.cpu_devices)
    whole = load_config(model_folder(args.model))
    model = cut(whole, min(args.layers, whole.num_layers))
    if args.tokens % args.seq_len:
        raise UsageError(
            f"--tokens is {args.tokens}; expected a multiple of --seq-len, {args.seq_len}"
        )
    if args.seq_len > model.context:
        raise UsageError(
            f"--seq-len is {args.seq_len}; expected at most the model's context, {model.context}"
        )
    config = DistillConfig(
        draft=DraftConfig(width=model.moe.expert_width),
        seq_len=args.seq_len,
        batch_size=args.tokens // args.seq_len,
        dtype=args.dtype,
        compute=args.dtype,
        remat=args.remat,
    )
    mesh = make_mesh(config.mesh)
    check_rows(config, model, mesh)
    say("compiling at each depth")
    with _nothing_cached():
        # A model may begin with more dense layers than the least depth has.
        depths = [max(depth, whole.moe_layers[0] + 1) for depth in DEPTHS]
        compiled = [compile_seconds(cut(whole, depth), config, mesh) for depth in depths]
    say(f"{model.num_layers} layers with random weights")
    result = {"model": str(args.model), "layers": model.num_layers, "tokens": args.tokens}
    result |= step_cost(model, config, repeats=args.repeats, profiled=args.profile) | {
        "compile": compiled
    }
    report(args.json, result, lambda: _show(result))
    return 0


def _show(result: dict[str, Any]) -> None:
    seconds, spread = result["seconds"], result["spread"]
    base = seconds["target"]
    rows = [(n, s, f"{spread[n]:.2g}", f"{s / base:.2f}") for n, s in seconds.items()]
    note = (
        f"{result['tokens']} tokens, random weights. step / target {result['ratio']:.2f}, floor by "
        f"operations {result['floor']:.2f}: {result['ratio_to_floor']:.2f} times the floor"
    )
    print_table("cost of a step", ("part", "seconds", "spread", "to target"), rows, note)
    if result["profile"]:
        kinds = [
            (row["kind"], row["seconds"], format_percent(row["share"])) for row in result["profile"]
        ]
        note = "summed over the threads that compute, operations inside of others once"
        print_table("where a step's time goes", ("kind", "seconds", "share"), kinds, note)
    names = ("layers", "trace_seconds", "compile_seconds", "lines")
    rows = [[row[name] for name in names] for row in result["compile"]]
    print_table("compilation", [name.replace("_", " ") for name in names], rows)


if __name__ == "__main__":
    sys.exit(run_module("step_cost", main))
