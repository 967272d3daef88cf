"""A trained predictor of experts on disk: one safetensors file, bound to its target and its draft.

    predictor.safetensors   tensors `state`, `token`, `offset`, `heads`, `bias`, `parent`
                            (`dejax.draft.predictor`), float32; metadata: schema, target, draft
                            (identities), layers, training (JSON)

The file is written whole or not at all; nothing is unpickled.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dejax.ckpt.draft_state import Bound, check_tensors, draft_identity
from dejax.ckpt.tensor_files import write_whole
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor, predictor_shapes
from dejax.errors import FailedError, UsageError
from dejax.paths import kind_of, shown

SCHEMA = "dejax-predictor/1"
FILE = "predictor.safetensors"
MADE_BY = "python -m train.predictor"


def save_predictor(path: Path, predictor: ExpertPredictor) -> Path:
    """Writes a predictor, and returns the path. What was there is replaced.

    Raises:
      FailedError: it cannot be written.
    """
    params = jax.device_get(predictor.params)
    tensors = {name: np.ascontiguousarray(a, np.float32) for name, a in params.items()}
    metadata = {
        "format": "pt",
        "schema": SCHEMA,
        "target": predictor.target,
        "draft": predictor.draft,
        "layers": json.dumps(predictor.layers),
        "training": json.dumps(dict(predictor.training)),
    }
    try:
        with write_whole(path) as unfinished:
            save_file(tensors, unfinished, metadata=metadata)
            unfinished.chmod(0o644)  # safetensors makes files for the owner alone
    except (OSError, SafetensorError) as error:
        raise FailedError(f"{path}: cannot be written: {error}") from error
    return path


def load_predictor(path: str | Path, target: Bound, draft: Draft | None) -> ExpertPredictor:
    """Reads a predictor's file, or the one in the folder that its training wrote.

    Raises:
      UsageError: it is missing, damaged, no predictor, of another target or other draft experts, or
        any of its tensors is missing, unknown, misshapen or not finite (all are listed).
    """
    place = Path(path)
    if kind_of(place) == "folder":
        place = place / FILE
    if kind_of(place) != "file":
        raise UsageError(f"{shown(place)} does not exist; expected what `{MADE_BY}` wrote")
    try:
        with safe_open(place, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise UsageError(f"{shown(place)}: not a readable safetensors file ({error})") from None
    facts = _read_metadata(place, metadata)
    found = ExpertPredictor(
        params=tensors,
        layers=facts["layers"],
        target=metadata["target"],
        draft=metadata["draft"],
        training=facts["training"],
    )
    check_predictor(found, target, draft, shown(place))
    rank = tensors["offset"].shape[0] if tensors.get("offset", np.zeros(())).ndim else 1
    check_tensors(place, tensors, predictor_shapes(target.config, max(rank, 1)))
    params = {name: jax.device_put(a.astype(np.float32)) for name, a in tensors.items()}
    return ExpertPredictor(params, found.layers, found.target, found.draft, found.training)


def check_predictor(
    predictor: ExpertPredictor, target: Bound, draft: Draft | None, name: str = "the predictor"
) -> None:
    """Refuses a predictor of another target, or of other draft experts; `name` is what to call it.

    Raises:
      UsageError: so.
    """
    if predictor.target != target.identity:
        raise UsageError(
            f"{name}: was trained for target {predictor.target}, not for {target.name} "
            f"({target.identity}); train one for this target with `{MADE_BY}`"
        )
    own = "none" if draft is None else draft_identity(draft)
    if predictor.draft != own:
        raise UsageError(
            f"{name}: was trained with draft experts {predictor.draft}, and the draft here is "
            f"{own}; give that draft, or train a predictor for this one with `{MADE_BY}`"
        )
    if predictor.layers != target.config.moe_layers:
        raise UsageError(
            f"{name}: is for layers {predictor.layers}; expected {target.config.moe_layers}"
        )


def _read_metadata(place: Path, metadata: dict[str, str]) -> dict[str, Any]:
    schema = metadata.get("schema")
    if schema is None or not schema.startswith(SCHEMA.split("/")[0]):
        raise UsageError(
            f"{shown(place)}: is no predictor of experts; expected a file that `{MADE_BY}` wrote"
        )
    if schema != SCHEMA:
        raise UsageError(f"{shown(place)}: schema {schema!r}; this version reads {SCHEMA}")
    try:
        layers, training = (json.loads(metadata[key]) for key in ("layers", "training"))
        whole = isinstance(training, dict) and all(type(layer) is int for layer in layers)
    except (KeyError, ValueError, TypeError):
        whole = False
    if not whole or not {"target", "draft"} <= metadata.keys():
        raise UsageError(
            f"{shown(place)}: its metadata is damaged; expected target, draft, layers and training"
        )
    return {"layers": tuple(layers), "training": training}
