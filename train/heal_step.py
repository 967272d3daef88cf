"""One training step of healing: a dense model and a MoE over the same tokens, in one jit.

The objective is the KL divergence of the MoE's next-token law from the dense model's, and the
global load-balance loss (arXiv 2501.11873), whose loads are those of the whole batch.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dejax.model import Params, Transformer, head_of
from dejax.pytree import pytree
from dejax.sharding import split_rows
from train.losses import Total, VocabularyTotals, load_balance, vocabulary_losses
from train.stacked import (
    LayerTap,
    StackedDef,
    StackedParams,
    dense_forward,
    expert_counts,
    forward,
    load_shares,
)
from train.update import Batch, micro_batches, update

_PARTS = {
    "routers": re.compile(r"\brouter\.(weight|bias)$"),
    "down": re.compile(r"\bdown_proj\.(weight|bias)$"),
    "norms": re.compile(r"norm\.weight$"),
    # Upcycling leaves embedding and head as they are, and a selection bias has no gradient.
    "all": re.compile(r"^(?!.*\b(embedding|head|selection_bias)$)"),
}


@pytree(frozen=True)
class HealState:
    """What a checkpoint holds: trained weights and optimizer state.

    Attributes:
      trained: `outer`, `layers` and `routed` as `StackedParams` has them, float32, with None for a
      frozen array; `routed` [L, E, 1, F, D] where only down projections are trained.
    """

    trained: Params
    opt_state: Any


class Models(NamedTuple):
    """The static side of both models."""

    dense: StackedDef
    moe: StackedDef


class Constants(NamedTuple):
    """What a step only reads: the MoE's frozen weights, as `HealState.trained`; the dense model."""

    frozen: Params
    dense: StackedParams


def split_trained(params: StackedParams, parts: Sequence[str]) -> tuple[Params, Params]:
    """A MoE's weights as (trained, frozen); each has None where the other has an array.

    `parts` are of `train.heal_config.Part`. Of the routed experts, gates and ups may be frozen and
    downs trained: then both have a part of the array.
    """
    tree = {"outer": params.outer, "layers": params.layers}

    def chosen(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return any(_PARTS[part].search(name) for part in parts)

    def kept(wanted):
        keep = lambda path, leaf: leaf if chosen(path, leaf) == wanted else None  # noqa: E731
        return jax.tree_util.tree_map_with_path(keep, tree)

    trained, frozen = kept(True), kept(False)
    whole, none = params.routed, None
    if "all" in parts:
        halves = whole, none
    elif "down" in parts:
        halves = whole[:, :, 2:], whole[:, :, :2]
    else:
        halves = none, whole
    return trained | {"routed": halves[0]}, frozen | {"routed": halves[1]}


def join_trained(trained: Params, frozen: Params) -> StackedParams:
    """The whole MoE again: the inverse of `split_trained`."""
    pick = lambda one, other: other if one is None else one  # noqa: E731
    missing = lambda leaf: leaf is None  # noqa: E731
    outer, layers = (
        jax.tree.map(pick, trained[name], frozen[name], is_leaf=missing)
        for name in ("outer", "layers")
    )
    pieces = [part["routed"] for part in (frozen, trained) if part["routed"] is not None]
    routed = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)
    return StackedParams(outer=outer, layers=layers, routed=routed)


class Compared(NamedTuple):
    """Both models over a batch.

    Attributes:
      objective: the sum behind the KL, with its gradient; vocabulary: totals; taps: of the MoE.
    """

    objective: Float[Array, ""]
    vocabulary: VocabularyTotals
    taps: LayerTap


def compare_models(
    trained: Params,
    constants: Constants,
    batch: Batch,
    *,
    models: Models,
    temperature: float = 1.0,
    dtype: Any = jnp.float32,
    remat: str = "none",
) -> Compared:
    """The MoE's logits against the dense model's, which are constants."""
    teacher, wanted = dense_forward(models.dense, constants.dense, batch, dtype=dtype)
    outer, x, taps = _moe_forward(
        trained, constants, batch, models=models, dtype=dtype, remat=remat
    )
    objective, vocabulary = vocabulary_losses(
        jax.lax.stop_gradient(head_of(outer)),
        teacher.norm(wanted),
        outer.norm(x),
        batch["targets"],
        batch["mask"],
        teacher_head=head_of(teacher),
        temperature=temperature,
    )
    return Compared(objective, vocabulary, taps)


def _moe_forward(
    trained: Params,
    constants: Constants,
    batch: Batch,
    *,
    models: Models,
    dtype: Any,
    remat: str = "none",
) -> tuple[Transformer, Float[Array, "B T D"], LayerTap]:
    params = join_trained(trained, constants.frozen)
    return forward(models.moe, params, batch, dtype=dtype, remat=remat == "layer")


def counts_of(taps: LayerTap, batch: Batch, models: Models) -> Float[Array, "L E"]:
    """Assignments of counted tokens to each expert."""
    experts = models.moe.config.moe.num_experts
    return expert_counts(taps.routing.ids, batch["mask"], num_experts=experts)


def loss_fn(
    trained: Params,
    batch: Batch,
    load: Float[Array, "L E"] | None,
    constants: Constants,
    *,
    balance_weight: float,
    **options: Any,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """KL + balance_weight * load-balance loss of a batch, and what a step reports.

    `load` is each expert's share where this batch is a part of a larger one, None if it is whole;
    `options` are those of `compare_models`.
    """
    found = compare_models(trained, constants, batch, **options)
    routing, models = found.taps.routing, options["models"]
    if load is None:
        load = load_shares(counts_of(found.taps, batch, models))
    balance = load_balance(routing.scores, load, batch["mask"]).mean()
    logit = Total(found.objective, found.vocabulary.logit.count).mean
    loss = logit + balance_weight * balance
    experts = load.shape[-1]
    metrics = {
        "loss": loss,
        "kl": found.vocabulary.logit.mean,
        "agreement": found.vocabulary.agreement.mean,
        "next_token": found.vocabulary.draft.mean,
        "balance": balance,
        "load_max": load.max() * experts,
        "load_min": load.min() * experts,
    }
    return loss, metrics


def whole_load(
    trained: Params,
    batch: Batch,
    constants: Constants,
    *,
    models: Models,
    accumulate: int,
    dtype: Any,
) -> Float[Array, "L E"]:
    """Each expert's share of a batch's assignments, found in as many parts as the gradient is."""

    def count(part):
        part = jax.tree.map(split_rows, part)
        _, _, taps = _moe_forward(trained, constants, part, models=models, dtype=dtype)
        return counts_of(taps, part, models)

    return load_shares(jax.lax.map(count, micro_batches(batch, accumulate)).sum(axis=0))


def make_step(
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    balance_weight: float,
    **options: Any,
) -> Callable[..., tuple[HealState, dict[str, Array]]]:
    """The jitted step (constants, state, batch) -> (state, metrics); state is donated.

    A batch that is cut into parts goes through the MoE once more before, for its loads: a part's
    own would balance every part, where only the whole has to be.
    """

    @partial(jax.jit, donate_argnums=1)
    def step(constants: Constants, state: HealState, batch: Batch):
        load = None
        if accumulate > 1 and balance_weight:
            part = dict(models=options["models"], dtype=options["dtype"])
            load = whole_load(state.trained, batch, constants, accumulate=accumulate, **part)
        trained, opt_state, metrics = update(
            optimizer,
            partial(loss_fn, balance_weight=balance_weight, **options),
            state.trained,
            state.opt_state,
            batch,
            load,
            constants,
            accumulate=accumulate,
        )
        return HealState(trained=trained, opt_state=opt_state), metrics

    return step


def make_totals(**options: Any) -> Callable[..., dict[str, Total]]:
    """The jitted (constants, trained, batch) -> totals of held-out text, for `add_up`.

    `kl`, `agreement`, `next_token`, `dense_next_token` (nats), and `load` [L, E], each expert's
    share of a layer's assignments. `options` are those of `compare_models`.
    """

    @jax.jit
    def totals(constants: Constants, trained: Params, batch: Batch) -> dict[str, Total]:
        found = compare_models(trained, constants, batch, **options)
        counts = counts_of(found.taps, batch, options["models"])
        return {
            "kl": found.vocabulary.logit,
            "agreement": found.vocabulary.agreement,
            "next_token": found.vocabulary.draft,
            "dense_next_token": found.vocabulary.full,
            "load": Total(counts, counts.sum(axis=-1, keepdims=True)),
        }

    return totals
