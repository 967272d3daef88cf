"""`dejax convert MODEL --out DIR`: a Hugging Face folder to resident weights and an expert store.

    DIR/experts/            one record a layer-expert, read one by one while decoding
    DIR/model.safetensors   every other weight, as stored in MODEL, under the same names
    DIR/config.json         and the tokenizer's files, as they are in MODEL

One expert is in memory at a time. `config.json` takes its place last, so that a folder without it
is unfinished; the same command continues it, after checking what is there against MODEL. Of a
finished folder it mends what is damaged. At the end everything is read back.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dejax.ckpt import expert_codec
from dejax.ckpt.expert_store import ExpertStore, ExpertStoreWriter
from dejax.ckpt.hf_weights import CheckpointPlan, plan_checkpoint, read_layer_experts
from dejax.ckpt.tensor_files import SINGLE_FILE, copy_tensors, equal_tensors, write_whole
from dejax.ckpt.tiktoken_file import TIKTOKEN_FILE
from dejax.errors import FailedError, UsageError
from dejax.target import STORE_DIR, checkpoint_identity, load_config, model_folder
from infer.argument_types import Model, OutputFile, OutputFolder, Positional
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.output import check_output_folder, check_room, report
from infer.units import format_bytes

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TIKTOKEN_FILE,
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside the weights that a target is used with."""

_STORE_MARKS = ("journal.jsonl", "manifest.json")  # one of them is in every store, begun or whole
_FILE_SLACK = 4096  # what a file may take on disk beyond its bytes
_MB = 1e6


@dataclass(frozen=True)
class Conversion:
    """What a finished conversion wrote.

    Attributes:
      out: the folder; identity: of the target; dtype: of the stored experts.
      experts: records in the store; already_there: how many of them an earlier run had written;
      mended: how many of those were damaged or gone, and have been written again.
      expert_bytes, resident_bytes: of the store's records, and of all other weights.
    """

    out: Path
    identity: str
    dtype: str
    experts: int
    already_there: int
    mended: int
    expert_bytes: int
    resident_bytes: int


def convert(model: str | Path, out: Path, *, experts: str | None = None) -> Conversion:
    """Converts a Hugging Face folder; continues where an earlier call was stopped.

    Args:
      model: the folder, or "tiny".
      out: the folder to write; absent, empty, or begun by the same conversion.
      experts: a key of `expert_codec.OPTIONS`; None keeps what the checkpoint has (float16 and FP8
        become float32, MXFP4 becomes bfloat16, which hold them exactly). A quantised store is
        another target: every mode is exact to it.

    Raises:
      UsageError: the model is not one, or `out` holds something else.
      FailedError: the disk is full or fails, or what was written does not read back.
    """
    folder = model_folder(model)
    if (folder / STORE_DIR).exists():
        raise UsageError(f"{folder} is converted already; give the Hugging Face folder it is from")
    config = load_config(folder)
    if not config.moe_layers:
        raise UsageError(f"{folder} has no MoE layers; there are no experts to convert")
    plan = plan_checkpoint(folder, config)
    stored = plan.expert_dtype.name
    dtype = expert_codec.OPTIONS[experts] if experts else {"float16": "float32"}.get(stored, stored)
    _check_out(out, folder)
    _check_room(out, plan, dtype)
    with _disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        writer = ExpertStoreWriter(
            out / STORE_DIR,
            layers=config.moe_layers,
            num_experts=config.moe.num_experts,
            shape=config.expert_shape,
            dtype=dtype,
            identity=checkpoint_identity(plan),
        )
    with writer:
        before = len(writer.done)
        _write_experts(writer, plan, dtype)
        with _disk_errors(out):
            store = writer.finish()
    _write_rest(folder, out, plan)
    _verify(store, out, plan)
    _copy_whole(folder / "config.json", out / "config.json")
    return Conversion(
        out=out,
        identity=store.identity,
        dtype=dtype,
        experts=len(store.pairs),
        already_there=before,
        mended=writer.mended,
        expert_bytes=len(store.pairs) * store.bytes_per_expert,
        resident_bytes=sum(entry.nbytes for entry in plan.resident.values()),
    )


def _check_out(out: Path, folder: Path) -> None:
    """Refuses an `out` that is neither new nor a conversion, before anything is written."""
    check_output_folder(out)
    here, source = out.resolve(), folder.resolve()
    if here.is_relative_to(source):
        raise UsageError(f"{out} is inside the model's own folder; give another one")
    if source.is_relative_to(here):
        raise UsageError(f"{out} is a folder above the model's own; give another one")
    for above in here.parents:
        if any((above / STORE_DIR / mark).exists() for mark in _STORE_MARKS):
            raise UsageError(f"{out} is inside {above}, which is converted; give another folder")
    found = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    begun, whole = ((out / STORE_DIR / mark).exists() for mark in _STORE_MARKS)
    if found and not (begun or whole) and found != [STORE_DIR]:
        raise UsageError(f"{out} holds {found[0]} but no conversion; give a new folder")
    if "config.json" in found and not whole:
        raise UsageError(f"{out} holds a config.json that is not this command's; give a new folder")


def _check_room(out: Path, plan: CheckpointPlan, dtype: str) -> None:
    """Refuses to begin what the disk has no room for; the records that are there need none."""
    config = plan.config
    records = (out / STORE_DIR).rglob("expert_*")
    there = sum(file.stat().st_size + _FILE_SLACK for file in records)
    experts = len(config.moe_layers) * config.moe.num_experts
    record = expert_codec.record_bytes(dtype, config.expert_shape)
    needed = experts * (record + _FILE_SLACK)
    needed += sum(entry.nbytes + _FILE_SLACK for entry in plan.resident.values()) - there
    check_room(out, needed)


def _write_experts(writer: ExpertStoreWriter, plan: CheckpointPlan, dtype: str) -> None:
    """Every record in order; those already there are checked to be the same."""
    config = plan.config
    held = expert_codec.PLAIN.get(dtype, np.dtype(np.float32))
    size = expert_codec.record_bytes(dtype, config.expert_shape) / _MB
    if writer.done:
        say(f"continuing: {len(writer.done)} experts are there already, and are compared")
    count = len(config.moe_layers) * config.moe.num_experts
    with progress("experts", count * size, "MB") as bar:
        for layer in config.moe_layers:
            for expert, record in read_layer_experts(plan, layer, dtype=held):
                with _disk_errors(f"layer {layer}, expert {expert}"):
                    writer.write(layer, expert, record)
                bar.advance(size, layer=layer)


def _write_rest(folder: Path, out: Path, plan: CheckpointPlan) -> None:
    """Everything but experts and configuration."""
    entries = plan.resident_entries()
    total = sum(entry.nbytes for entry in entries.values())
    with progress("other weights", total / _MB, "MB") as bar, _disk_errors(out):
        copy_tensors(out / SINGLE_FILE, entries, lambda count: bar.advance(count / _MB))
        copy_companions(folder, out)


def copy_companions(folder: Path, out: Path) -> None:
    """Copies what a model folder has beside weights and configuration: tokenizer and all."""
    for name in COPIED:
        if (folder / name).is_file():
            _copy_whole(folder / name, out / name)


def _copy_whole(source: Path, target: Path) -> None:
    with write_whole(target) as unfinished:
        shutil.copyfile(source, unfinished)


def _verify(store: ExpertStore, out: Path, plan: CheckpointPlan) -> None:
    """Reads back what was written: experts by checksum, other weights against the source."""
    size = store.bytes_per_expert / _MB
    with progress("check", len(store.pairs) * size, "MB") as bar:
        store.verify_all(lambda done, total: bar.advance(size))
    written = plan_checkpoint(out, plan.config, resident_only=True)
    for path, entry in plan.resident.items():
        if not equal_tensors(entry, written.resident[path]):
            raise FailedError(f"{written.resident[path].file}: {path} is not as it was written")


@contextmanager
def _disk_errors(where: object) -> Iterator[None]:
    """What the system says of a failed write, as one line."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # tensorstore reports the disk's errors as ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise FailedError(
            f"{where}: cannot be written ({reason}); mend that and run the same command again"
        ) from error


# The program.


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax convert`."""

    model: Positional[Model]
    """A Hugging Face folder, or tiny."""
    out: OutputFolder
    """Folder to write: new, or left behind by the same command, which continues or mends it."""
    experts: Literal["bf16", "f32", "fp8", "int8", "int4"] | None = None
    """How experts are stored and moved; as in the checkpoint unless given. fp8, int8 and
    int4 quantise them, in groups of 32 weights: another target, to which every mode is exact."""
    json: OutputFile | None = None
    """Write what was done here as JSON; - is standard output."""


def main(argv: list[str]) -> int:
    """Runs `dejax convert`."""
    about = "Turn a Hugging Face folder into resident weights and an expert store."
    args = parse(Arguments, argv, prog="dejax convert", description=about)
    if args.json is not None and args.json.resolve().is_relative_to(args.out.resolve()):
        raise UsageError(f"--json: {args.json} is inside --out; give another place")
    done = convert(args.model, args.out, experts=args.experts)
    report(args.json, done, lambda: _show(done))
    return 0


def _show(done: Conversion) -> None:
    mended = f", {done.mended} of them damaged and mended" if done.mended else ""
    there = f" ({done.already_there} were there already{mended})" if done.already_there else ""
    rows = [
        ("experts", f"{done.experts} as {done.dtype}, {format_bytes(done.expert_bytes)}{there}"),
        ("other weights", format_bytes(done.resident_bytes)),
        ("identity", done.identity),
    ]
    print_table(f"{done.out}: converted and checked", ("part", "written"), rows)
