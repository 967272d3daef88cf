"""Draft experts on disk: an adapter folder, bound to the target it was trained for.

    adapter.safetensors     layers.{l}.draft_expert.{gate_proj,up_proj,down_proj}.weight and .gamma
    adapter_config.json     schema version, target (identity, family, dimensions), draft, training
    adapter.raw.safetensors where the adapter is an average over training: that of the last step
    confidence.safetensors  where there is a confidence head: confidence_head.{hidden,embedding,law,
                            biases,temperatures}

One that `dejax export --format torch` wrote also holds what `transformers` needs (`BESIDE`). `l` is
the decoder's own layer index. Projections have the layout of the target's checkpoint ([out, in]). A
folder is written whole or not at all; nothing is unpickled. The head has a file of its own, so that
what knows nothing of it reads the draft experts as ever.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dejax.ckpt.gguf_draft import read_gguf_adapter
from dejax.ckpt.tensor_files import bad_tensors, read_json
from dejax.ckpt.whole_folder import whole_folder
from dejax.config import DraftConfig, ModelConfig
from dejax.draft.confidence import ConfidenceHead, head_shapes
from dejax.draft.expert import Draft, DraftExpert, random_draft
from dejax.errors import UsageError
from dejax.paths import existing_folder, kind_of, shown

SCHEMAS = {"full": 1, "plain": 2}
"""Gates of the draft path -> the schema version: what reads 1 alone would take all for full."""
WEIGHTS_FILE = "adapter.safetensors"
CONFIG_FILE = "adapter_config.json"
RAW_FILE = "adapter.raw.safetensors"
HEAD_FILE = "confidence.safetensors"
HEAD_PREFIX = "confidence_head."
BESIDE = ("config.json", "modeling_draft_experts.py")
"""What else may lie in an adapter folder of ours."""


@runtime_checkable
class Bound(Protocol):
    """What an adapter is checked against: a loaded target, or whatever knows as much of one."""

    @property
    def config(self) -> ModelConfig:
        """The target's configuration."""
        ...

    @property
    def identity(self) -> str:
        """The target's identity."""
        ...

    @property
    def name(self) -> str:
        """What messages call it."""
        ...


def _names(layer: int) -> dict[str, str]:
    """Part of a draft expert -> its tensor's name."""
    prefix = f"layers.{layer}.draft_expert."
    projections = ("gate_proj", "up_proj", "down_proj")
    return {part: f"{prefix}{part}.weight" for part in projections} | {"gamma": prefix + "gamma"}


def draft_tensors(draft: Draft) -> dict[str, np.ndarray]:
    """The adapter's tensors, by name, in float32."""
    tensors = {}
    for layer in sorted(draft.experts):
        params = jax.device_get(draft.layer_params(layer))
        gate, up, down = np.asarray(params["weights"], np.float32)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down.T, "gamma": params["gamma"]}
        for part, name in _names(layer).items():
            tensors[name] = np.ascontiguousarray(parts[part], np.float32).reshape(parts[part].shape)
    return tensors


def draft_identity(draft: Draft) -> str:
    """What tells draft experts of one target from others: a hash of a part of every layer's."""
    digest = hashlib.sha256(repr((draft.identity, draft_facts(draft.config))).encode())
    for layer in sorted(draft.experts):
        params = draft.layer_params(layer)
        # Every row changes in training: the first ones tell as much as all.
        for part in jax.device_get((params["weights"][:, 0], params["gamma"])):
            digest.update(np.ascontiguousarray(part, np.float32).tobytes())
    return digest.hexdigest()[:16]


def save_draft(
    folder: str | Path,
    draft: Draft,
    target_config: ModelConfig,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes an adapter folder, whole or not at all, and returns it. An older adapter is replaced.

    `beside` are further files, by a name of `BESIDE`.

    Raises:
      UsageError: something else than an adapter is in the folder's place.
      FailedError: it cannot be written.
    """
    folder = Path(folder).absolute()
    check_draft_folder(folder)
    config = {
        "schema": SCHEMAS[draft.config.gates],
        "target": {"identity": draft.identity} | target_facts(target_config),
        "draft": draft_facts(draft.config),
        "training": dict(draft.training),
    }
    files = {WEIGHTS_FILE: draft_tensors(draft)}
    if draft.raw is not None:
        files[RAW_FILE] = draft_tensors(replace(draft, experts=draft.raw))
    if draft.head is not None:
        files[HEAD_FILE] = head_tensors(draft.head)
    with whole_folder(folder) as partial:
        for name, tensors in files.items():
            save_file(tensors, partial / name, metadata={"format": "pt"})
            (partial / name).chmod(0o644)  # safetensors makes files for the owner alone
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, data in (beside or {}).items():
            (partial / name).write_bytes(data)
    return folder


def head_tensors(head: ConfidenceHead) -> dict[str, np.ndarray]:
    """The tensors of a confidence head, by name, in float32."""
    return {
        HEAD_PREFIX + name: np.ascontiguousarray(array, np.float32)
        for name, array in head.arrays().items()
    }


def draft_facts(config: DraftConfig) -> dict[str, Any]:
    """What an adapter says of the draft path; gates only where they are not the target's own."""
    plain = {} if config.gates == "full" else {"gates": config.gates}
    return {"width": config.width, "top_r": config.top_r} | plain


def check_gates(draft: DraftConfig, config: ModelConfig) -> None:
    """Refuses plain gates where the target's own are that already, or come from no score.

    Raises:
      UsageError: so.
    """
    if draft.gates == "full":
        return
    moe = config.moe
    if moe.scoring != "sigmoid" or draft.top_r == 0:
        raise UsageError(
            f"draft.gates is plain (top_r {draft.top_r}); expected full for {config.family}: plain "
            "gates are for families that choose by score + bias (deepseek_v3, glm4_moe), and one "
            "routed expert or more"
        )


def target_facts(config: ModelConfig) -> dict[str, Any]:
    """What an adapter says of the target it is for, beside its identity."""
    return {
        "family": config.family,
        "layers": config.num_layers,
        "moe_layers": list(config.moe_layers),
        "width": config.width,
        "num_experts": config.moe.num_experts,
        "top_k": config.moe.top_k,
        "expert_width": config.moe.expert_width,
    }


def check_draft_folder(folder: str | Path) -> None:
    """Refuses a place where `save_draft` would overwrite something else than an adapter.

    Raises:
      UsageError: it would, or the system does not take the path.
    """
    if kind_of(folder) and not _is_replaceable(Path(folder)):
        raise UsageError(
            f"{folder}: exists and is not a draft adapter alone; choose another folder"
        )


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or holds a draft adapter of ours and nothing else."""
    if not folder.is_dir():
        return False
    found = {path.name for path in folder.iterdir()}
    if not found:
        return True
    if (
        not found <= {WEIGHTS_FILE, CONFIG_FILE, RAW_FILE, HEAD_FILE, *BESIDE}
        or CONFIG_FILE not in found
    ):
        return False
    config = read_json(folder / CONFIG_FILE)
    target = config.get("target")
    return "schema" in config and isinstance(target, dict) and "identity" in target


def load_draft(path: str | Path, target: Bound | None = None) -> Draft:
    """Reads an adapter folder or GGUF file; with `target`, only if it was trained for that target.

    Raises:
      UsageError: it is missing, malformed, of another schema or target, or any of its tensors is
        missing, unknown, misshapen or not finite (all are listed).
    """
    place, raw, head = Path(path), None, None
    if place.suffix == ".gguf" and kind_of(place) != "folder":
        config, tensors = read_gguf_adapter(place)
        _check_config(place, config)
    else:
        config = _read_config(place)
        tensors = _read_tensors(place, WEIGHTS_FILE)
        raw = _read_tensors(place, RAW_FILE) if kind_of(place / RAW_FILE) == "file" else None
        if kind_of(place / HEAD_FILE) == "file":
            head = _read_head(place, config["target"]["width"])
    bound, told = config["target"], config["draft"]
    if target is not None and bound["identity"] != target.identity:
        raise UsageError(
            f"{place}: the adapter was trained for target {bound['identity']}, not for "
            f"{target.name} ({target.identity}); distill draft experts for this one"
        )
    layers = bound["moe_layers"]
    for each in (tensors, raw):
        if each is not None:
            check_tensors(place, each, _expected_shapes(layers, told["width"], bound["width"]))
    draft = DraftConfig(told["width"], told["top_r"], told.get("gates", "full"))
    if target is not None:
        check_gates(draft, target.config)
        most = target.config.moe.top_k
        if draft.top_r > most:
            raise UsageError(
                f"{place}: draft.top_r is {draft.top_r}; expected at most {most}, the experts that "
                "the target chooses"
            )
    return Draft(
        config=draft,
        experts=draft_experts(tensors, layers),
        identity=bound["identity"],
        training=config["training"],
        raw=None if raw is None else draft_experts(raw, layers),
        head=head,
    )


def _read_tensors(folder: Path, name: str) -> dict[str, np.ndarray]:
    try:
        return load_file(folder / name)
    except FileNotFoundError:
        raise UsageError(f"{folder}: no {name}; expected an adapter folder") from None
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder / name}: not a readable safetensors file ({error})") from None


def _read_head(folder: Path, width: int) -> ConfidenceHead:
    """The confidence head of an adapter folder, checked."""
    place, tensors = folder / HEAD_FILE, _read_tensors(folder, HEAD_FILE)
    biases = tensors.get(f"{HEAD_PREFIX}biases", np.zeros(0))
    shapes = head_shapes(width, max(1, biases.shape[-1]))
    check_tensors(place, tensors, {HEAD_PREFIX + name: shape for name, shape in shapes.items()})
    arrays = {name: tensors[HEAD_PREFIX + name].astype(np.float32) for name in shapes}
    if (arrays["temperatures"] <= 0).any():
        raise UsageError(f"{place}: temperatures must be above 0")
    return ConfidenceHead(**arrays)


def draft_experts(tensors: Mapping[str, np.ndarray], layers: list[int]) -> dict[int, DraftExpert]:
    """The draft experts of an adapter's tensors: the inverse of `draft_tensors`."""
    experts = {}
    for layer in layers:
        gate, up, down, gamma = (
            tensors[name].astype(np.float32) for name in _names(layer).values()
        )
        weights = jax.device_put(np.stack([gate, up, down.T]))
        experts[layer] = DraftExpert(weights, jax.device_put(gamma))
    return experts


def _read_config(folder: Path) -> dict[str, Any]:
    """The checked content of an adapter's configuration file."""
    existing_folder(folder, "an adapter folder written by `dejax distill`")
    if kind_of(folder / CONFIG_FILE) != "file":
        nested = folder / "draft"
        hint = f"; did you mean {nested}?" if (nested / CONFIG_FILE).is_file() else ""
        raise UsageError(f"{shown(folder)}: no {CONFIG_FILE}; expected an adapter folder{hint}")
    config = read_json(folder / CONFIG_FILE)
    schema, known = config.get("schema"), tuple(SCHEMAS.values())
    if type(schema) is not int or schema not in known:  # to Python, true is 1
        read = " and ".join(map(str, known))
        raise UsageError(f"{folder / CONFIG_FILE}: schema {schema!r}; this version reads {read}")
    _check_config(folder / CONFIG_FILE, config)
    training = config.get("training")
    return config | {"training": training if isinstance(training, dict) else {}}


def _check_config(place: Path, config: dict[str, Any]) -> None:
    """Refuses a configuration without what loading needs."""
    kinds = {
        ("target", "identity"): str,
        ("target", "width"): int,
        ("target", "moe_layers"): list,
        ("draft", "width"): int,
        ("draft", "top_r"): int,
    }
    for (group, key), kind in kinds.items():
        part = config.get(group)
        value = part.get(key) if isinstance(part, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{place}: {group}.{key} is {value!r}; expected {kind.__name__}")
    gates = config["draft"].get("gates", "full")
    if gates not in ("full", "plain"):
        raise UsageError(f"{place}: draft.gates is {gates!r}; expected full or plain")
    layers = config["target"]["moe_layers"]
    if not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise UsageError(f"{place}: target.moe_layers is {layers}; expected layer indices")


def _expected_shapes(layers: list[int], f: int, d: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f), "gamma": ()}
    return {name: shapes[part] for layer in layers for part, name in _names(layer).items()}


def check_tensors(
    folder: Path, tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses tensors that are missing, unknown, misshapen, no floats, or not finite.

    Raises:
      UsageError: so, with all of them listed.
    """
    problems = [f"{name}: unknown" for name in tensors.keys() - expected.keys()]
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"{name}: missing")
        elif tensors[name].shape != shape:
            problems.append(f"{name}: shape {list(tensors[name].shape)}, expected {list(shape)}")
        elif not jnp.issubdtype(tensors[name].dtype, jnp.floating):
            problems.append(f"{name}: dtype {tensors[name].dtype}, expected floats")
        elif not np.isfinite(tensors[name].astype(np.float32)).all():
            problems.append(f"{name}: not finite")
    if problems:
        raise UsageError(f"{folder}: {bad_tensors(problems)}")


def resolve_draft(spec: str, target: Bound) -> Draft:
    """What `--draft` names: `init` or `init:SEED` (untrained draft experts), or an adapter folder.

    Raises:
      UsageError: as `load_draft`, or the seed is not a whole number >= 0.
    """
    if not target.config.moe_layers:
        raise UsageError(f"{target.name} is a dense model; it has no routed experts to draft with")
    word, colon, seed = spec.partition(":")
    if word != "init":
        return load_draft(spec, target)
    if colon and not (seed.isascii() and seed.isdigit() and int(seed[:12]) < 2**32):
        raise UsageError(f"draft {spec!r}: {seed!r} is no seed; expected init:SEED, 0 to 2^32 - 1")
    config = DraftConfig(width=target.config.moe.expert_width)
    return random_draft(target.config, config, seed=int(seed or 0), identity=target.identity)
