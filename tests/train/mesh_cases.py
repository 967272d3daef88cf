"""What `test_mesh` measures on eight devices, in one process."""

import dataclasses
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dejax.config import DraftConfig
from dejax.nn import experts
from dejax.sharding import (
    MeshConfig,
    draft_shardings,
    make_mesh,
    on_host,
    place,
    place_rows,
)
from dejax.target import Target, load_target
from tests.families.random_folder import raw_config, write_folder
from tests.infer.random_target import SHAPES, draft_of, random_prompt, random_target
from tests.train.rows import random_batch
from train.distill_config import DistillConfig
from train.distill_plan import abstract_step
from train.distill_step import loss_fn
from train.gradient_step import DistillState, make_step
from train.kv_mix import draw_blocks
from train.losses import LossWeights
from train.simulate import simulate, write_greedily
from train.teacher import as_teacher

# A length at which no pass has as many blocks of rows as a layer has experts (`held_whole`).
ROWS, LENGTH, STEPS = 8, 24, 2
WEIGHTS = LossWeights(logit=1.0, token=0.5, residual=0.25, router=2.0).vector()
ONE = MeshConfig(data=1)
ALL_BUT_TENSOR = MeshConfig(data=2, fsdp=2, expert=2)
ALL_BUT_DATA = MeshConfig(data=1, fsdp=2, expert=2, tensor=2)

# Name -> target, mesh, what else is asked of the step.
CASES: dict[str, tuple[str, MeshConfig, dict[str, Any]]] = {
    "data": ("shared", MeshConfig(data=8), {}),
    "latent attention, untied": ("shared", ALL_BUT_TENSOR, {}),
    "draft split": ("shared", ALL_BUT_DATA, dict(split=True)),
    "accumulated": ("shared", MeshConfig(data=2, fsdp=2), dict(accumulate=2)),
    "experts with biases": ("gpt-oss", ALL_BUT_DATA, {}),
    "windows, tied, dense between": ("qwen3-moe-sparse", ALL_BUT_TENSOR, dict(mixed=True)),
}


@cache
def target_of(name: str) -> Target:
    """A float32 target: a random shape's, or a family's."""
    if name in SHAPES:
        config = dataclasses.replace(SHAPES[name], vocab_size=160)  # no other array is as long
        return random_target(config, dtype=jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        return load_target(write_folder(Path(folder) / "m", raw_config(name)))


def batches(name: str, *, mixed: bool) -> list[dict[str, np.ndarray]]:
    """Packed rows for each step; the rows of a batch count differently many tokens."""
    found = []
    for step in range(STEPS):
        batch = random_batch(target_of(name).config, rows=ROWS, length=LENGTH, seed=step)
        batch = jax.tree.map(np.array, batch)
        for row in range(ROWS):
            batch["mask"][row, LENGTH - row :] = 0
        if mixed:
            batch["blocks"] = draw_blocks(range(ROWS), LENGTH, block=4, seed=0, step=step)
        found.append(batch)
    return found


@cache
def trained(name: str, config: MeshConfig, split=False, accumulate=1, mixed=False):
    """Metrics of each step, the draft after them, and the text of the compiled step."""
    # Changes in proportion to gradients: Adam makes as much of rounding where a gradient is zero.
    target, optimizer = target_of(name), optax.sgd(0.1, momentum=0.9)
    count = config.data * config.fsdp * config.expert * config.tensor
    mesh = make_mesh(config, jax.devices()[:count])
    teacher, draft = as_teacher(target, mesh), draft_of(target).stacked_params()
    state = DistillState(draft=draft, opt_state=optimizer.init(draft))
    state = place(jax.tree.map(np.array, state), draft_shardings(state, mesh, split=split))
    options = dict(definition=teacher.definition, r=1, dtype=teacher.dtype)
    step = make_step(optimizer, accumulate=accumulate, **options)
    metrics = []
    with jax.set_mesh(mesh):
        placed = [place_rows(batch, mesh, ROWS) for batch in batches(name, mixed=mixed)]
        compiled = step.lower(teacher.params, state, placed[0], WEIGHTS).compile()
        for rows in placed:
            state, found = compiled(teacher.params, state, rows, WEIGHTS)
            metrics.append({key: float(value) for key, value in found.items()})
    return metrics, on_host(state.draft), compiled.as_text()


def differences(name: str) -> dict[str, float]:
    """Largest relative difference of each metric and of the draft's changes to one device's."""
    target, mesh, options = CASES[name]
    metrics, draft, _ = trained(target, mesh, **options)
    alone = {key: value for key, value in options.items() if key != "split"}
    expected, wanted, _ = trained(target, ONE, **alone)
    found = {
        key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(metrics, expected, strict=True))
        for key in expected[0]
    }
    before = jax.tree.map(np.array, draft_of(target_of(target)).stacked_params())
    for key in before:
        change = np.abs(wanted[key] - before[key]).max()
        found[f"draft {key}"] = float(np.abs(draft[key] - wanted[key]).max() / change)
    return found


def mean_of_parts(name: str) -> dict[str, list[float]]:
    """Each metric of an accumulated step, and the mean of its parts weighted by their tokens."""
    target, mesh, options = CASES[name]
    metrics = trained(target, mesh, **options)[0][0]
    teacher, draft = as_teacher(target_of(target)), draft_of(target_of(target)).stacked_params()
    loss = partial(loss_fn, definition=teacher.definition, r=1, dtype=teacher.dtype)
    batch, count = batches(target, mixed=False)[0], options["accumulate"]
    parts = [{key: a[i::count] for key, a in batch.items()} for i in range(count)]
    found = [jax.jit(loss)(draft, teacher.params, part, WEIGHTS)[1] for part in parts]
    shares = [float(part["mask"].sum() / batch["mask"].sum()) for part in parts]
    return {
        key: [metrics[key], sum(w * float(m[key]) for w, m in zip(shares, found, strict=True))]
        for key in found[0]
    }


def held_whole(text: str) -> dict[str, bool]:
    """Which arrays a compiled step of the `shared` shape has somewhere on a device."""
    config = target_of("shared").config
    head, (experts, *record) = (config.vocab_size, config.width), (8, 3, 16, 32)

    def has(*shape):
        return f"[{','.join(map(str, shape))}]" in text

    return {
        "head": has(*head) or has(*reversed(head)),
        "part of the head": has(head[0] // 4, head[1]),
        "all experts of a layer": has(experts, *record) or has(1, experts, *record),
        "an expert group's part of a layer": has(experts // 2, *record),
    }


def bytes_beside(length: int, vocabulary: int) -> int:
    """Bytes that a compiled step takes beside its arguments."""
    model = dataclasses.replace(
        SHAPES["bare"], vocab_size=vocabulary, context=4096, tied=False, num_layers=1
    )
    config = DistillConfig(
        draft=DraftConfig(width=8), seq_len=length, batch_size=ROWS, mesh=ALL_BUT_TENSOR
    )
    mesh = make_mesh(ALL_BUT_TENSOR)
    _, step, arguments = abstract_step(model, config, mesh)
    with jax.set_mesh(mesh):
        analysis = step.lower(*arguments).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def bytes_of_layers(axes: MeshConfig, layers: tuple[int, ...]) -> list[int]:
    """Bytes beside its arguments of a step that recomputes nothing, by the number of MoE layers.

    A layer's experts have 3 MiB, far more than the activations that it keeps.
    """
    experts._COPIED_BYTES = 0  # or blocks would copy the weights of experts this small
    shape = SHAPES["bare"]
    wide = dataclasses.replace(shape.moe, num_experts=64, expert_width=128)
    found = []
    for count in layers:
        model = dataclasses.replace(shape, num_layers=count, experts=wide)
        config = DistillConfig(draft=DraftConfig(width=8), seq_len=8, batch_size=ROWS, mesh=axes)
        mesh = make_mesh(axes, jax.devices()[: axes.data * axes.fsdp * axes.expert])
        _, step, arguments = abstract_step(model, config, mesh)
        with jax.set_mesh(mesh):
            analysis = step.lower(*arguments).compile().memory_analysis()
        found.append(int(analysis.temp_size_in_bytes))
    return found


def simulated(config: MeshConfig) -> list[list[list[int]]]:
    """(committed, accepted) of every simulated round of three prompts."""
    mesh = make_mesh(config, jax.devices()[: config.data * config.fsdp * config.expert])
    target = target_of("shared")
    teacher, draft = as_teacher(target, mesh), draft_of(target).stacked_params()
    prompts = [random_prompt(length, seed=length) for length in (5, 9, 2)]
    text = write_greedily(teacher, prompts, max_new_tokens=12)
    rounds = simulate(teacher, draft, text, draft_length=2)
    return [[[r.committed, r.accepted] for r in prompt] for prompt in rounds]


def measure() -> dict[str, Any]:
    """Everything that the tests compare."""
    return {
        "differences": {name: differences(name) for name in CASES},
        "accumulated": mean_of_parts("accumulated"),
        "whole": {
            "mesh": held_whole(trained("shared", ALL_BUT_TENSOR)[2]),
            "one": held_whole(trained("shared", ONE)[2]),
        },
        "simulated": [simulated(config) for config in (ALL_BUT_TENSOR, ONE)],
        "bytes": [[bytes_beside(t, v) for v in (1024, 16384)] for t in (1024, 2048)],
        "layers": [bytes_of_layers(axes, (2, 6)) for axes in (ONE, ALL_BUT_TENSOR)],
    }
