"""Writes a target or draft experts for other programs: `dejax export MODEL --format F --out P`.

`safetensors` is dejax's own adapter folder (see `dejax.ckpt.draft_state`), checked against MODEL
and written anew; with `--draft init:SEED` it is that of untrained draft experts. `torch` is a
folder for Hugging Face `transformers`, `gguf` a file for llama.cpp: the target, the draft experts,
or both as one model (see `dejax.export`).
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dejax.ckpt.draft_state import (
    check_draft_folder,
    draft_tensors,
    head_tensors,
    resolve_draft,
    save_draft,
)
from dejax.ckpt.tensor_files import read_json
from dejax.ckpt.tiktoken_file import TIKTOKEN_FILE
from dejax.ckpt.whole_folder import whole_folder
from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.export import gguf, torch_model
from dejax.export.gguf_file import gguf_package
from dejax.export.provenance import without_folders, without_origin
from dejax.export.torch_adapter import companions
from dejax.target import Outline, load_tokenizer, model_folder, read_outline
from infer.argument_types import (
    Bytes,
    DraftSpec,
    Model,
    OutputFile,
    ParsedBy,
    Positional,
    did_you_mean,
)
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.convert import copy_companions
from infer.output import check_output, check_output_folder, check_room, make_folder, report
from infer.units import format_bytes

FORMATS = ("safetensors", "torch", "gguf")
SHARD = 5 * 10**9
_MB = 1e6
_CLEANED = ("tokenizer_config.json", "generation_config.json")

Kind = Literal["target", "adapter", "draft-model"]


def export_format(text: str) -> str:
    """`--format`: one that is written."""
    if text not in FORMATS:
        hint = did_you_mean(text, FORMATS)
        raise UsageError(f"{text!r} is unknown; expected {' or '.join(FORMATS)}{hint}")
    return text


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax export`."""

    model: Positional[Model]
    """A Hugging Face folder, a converted folder, or tiny."""
    out: Path
    """Folder to write; an adapter that is there is replaced. gguf: file to write."""
    draft: DraftSpec | None = None
    """Draft experts: a folder from `dejax distill`, or untrained ones. safetensors needs them."""
    format: Annotated[str, ParsedBy(export_format, "FORMAT")] = "safetensors"
    """What to write: safetensors, dejax's adapter folder; torch, a folder for Hugging Face
    transformers; or gguf, a file for llama.cpp."""
    as_: Kind | None = None
    """torch, gguf: the target (default without --draft), the draft experts alone (adapter, default
    with --draft), or the drafter as a model of its own (draft-model)."""
    weights: Literal["ema", "raw"] | None = None
    """Which weights of a draft that was trained with an average: the average (ema), which is what
    it holds first, or those of the last step (raw)."""
    dtype: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4"] | None = None
    """torch (f32, f16, bf16), gguf: what tensors are stored as; by default as in MODEL, and f32 for
    an adapter."""
    max_shard_size: Bytes = SHARD
    """torch: most bytes of tensors in a file of a target or draft model."""
    json: OutputFile | None = None
    """Write what was done here as JSON; - is standard output."""

    def __post_init__(self):
        if self.draft is None and self.format == "safetensors":
            raise UsageError("--draft is missing: safetensors is the format of draft experts")
        if self.kind == "target" and self.draft is not None:
            raise UsageError("--as target writes no draft experts; leave --draft out")
        if self.kind != "target" and self.draft is None:
            raise UsageError(f"--draft is missing: --as {self.kind} writes draft experts")
        if self.weights is not None and self.draft is None:
            raise UsageError("--weights is for draft experts; give --draft")
        self._check_form()

    def _check_form(self) -> None:
        """Refuses options that the format has no place for."""
        if self.format == "safetensors":
            for flag, value in (("--as", self.as_), ("--dtype", self.dtype)):
                if value is not None:
                    raise UsageError(f"{flag} is for --format gguf or torch")
        if self.format == "torch" and self.dtype is not None:
            if self.kind == "adapter":
                raise UsageError("--dtype: an adapter for torch is float32, as in training")
            if self.dtype not in torch_model.DTYPES:
                known = ", ".join(torch_model.DTYPES)
                raise UsageError(f"--dtype {self.dtype} is for --format gguf; torch has {known}")
        sharded = self.format == "torch" and self.kind != "adapter"
        if self.max_shard_size != SHARD and not sharded:
            raise UsageError("--max-shard-size is for --format torch, a target or a draft model")
        if self.max_shard_size == 0:
            raise UsageError("--max-shard-size is 0; expected a number of bytes, such as 2GB")

    @property
    def kind(self) -> Kind:
        """What is to be written."""
        return self.as_ or ("target" if self.draft is None else "adapter")

    @property
    def writes_adapter(self) -> bool:
        """Whether the result is an adapter folder."""
        return self.format != "gguf" and self.kind == "adapter"


def main(argv: list[str]) -> int:
    """Runs `dejax export`."""
    about = "Write a target, or draft experts checked against it, for other programs."
    args = parse(Arguments, argv, prog="dejax export", description=about)
    _check_out(args)
    outline = read_outline(args.model)
    draft = None if args.draft is None else _draft(args, outline)
    if args.format == "gguf":
        done = _write_gguf(args, outline, draft)
    elif draft is not None and args.writes_adapter:
        done = _write_adapter(args, outline, draft)
    else:
        done = _write_folder(args, outline, draft)
    about_it = {"out": args.out, "format": args.format, "as": args.kind, "target": outline.identity}
    done = about_it | done
    report(args.json, done, lambda: _show(done))
    return 0


def _check_out(args: Arguments) -> None:
    """Refuses, before any work is done, a place that cannot be written to."""
    if args.format == "gguf":
        gguf_package("--format gguf")
    try:
        if args.format == "gguf":
            if str(args.out) == "-":
                raise UsageError("a GGUF file is not written to standard output")
            check_output(args.out)
        else:
            check_output_folder(args.out)
            if not args.writes_adapter and args.out.exists() and any(args.out.iterdir()):
                raise UsageError(f"{args.out} is not empty; choose another folder")
    except UsageError as error:
        raise UsageError(f"--out: {error}") from None
    if args.writes_adapter:
        check_draft_folder(args.out)


def _draft(args: Arguments, outline: Outline) -> Draft:
    """The draft experts, of the weights asked for; what is told of training names no folder."""
    draft = resolve_draft(str(args.draft), outline)
    told = without_folders(dict(draft.training))
    averaged = draft.raw is not None
    if args.weights is not None and not averaged:
        raise UsageError(
            f"--weights {args.weights}: {args.draft} holds one set of weights; one trained with an "
            "average (setting ema) holds two"
        )
    if args.weights == "raw" and draft.raw is not None:
        draft = replace(draft, experts=draft.raw, head=_left_behind(draft, "fitted to the average"))
    if not args.writes_adapter:
        draft = replace(draft, head=_left_behind(draft, f"--format {args.format} has no place"))
    if averaged:
        told |= {"weights": args.weights or "ema"}
    return replace(draft, training=told, raw=None)


def _left_behind(draft: Draft, why: str) -> None:
    """Says that a confidence head is not written; there is none then."""
    if draft.head is not None:
        say(f"the draft's confidence head stays behind ({why})")


def _write_adapter(args: Arguments, outline: Outline, draft: Draft) -> dict[str, Any]:
    card = model_folder(args.model) / "README.md"
    beside = companions(outline, card) if args.format == "torch" else {}
    save_draft(args.out, draft, outline.config, beside)
    tensors = draft_tensors(draft) | ({} if draft.head is None else head_tensors(draft.head))
    return {
        "layers": len(draft.experts),
        "width": draft.config.width,
        "top_r": draft.config.top_r,
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }


def _write_folder(args: Arguments, outline: Outline, draft: Draft | None) -> dict[str, Any]:
    """A target or a draft model as a Hugging Face folder, with the tokenizer of MODEL."""
    for path in (model_folder(args.model) / name for name in _CLEANED):
        if path.exists():
            read_json(path)  # what is malformed is told by its own name, before any work
    if draft is None:
        export = torch_model.target_folder(args.model, outline, args.dtype)
    else:
        export = torch_model.draft_model_folder(args.model, outline, draft, args.dtype)
    check_room(args.out.absolute().parent, export.nbytes)
    size = export.nbytes / _MB
    with progress("export", size, "MB") as bar, whole_folder(args.out.absolute()) as folder:
        files = export.write(folder, args.max_shard_size, lambda n: bar.advance(n / _MB))
        copy_companions(model_folder(args.model), folder)
        if (folder / TIKTOKEN_FILE).exists():  # whose reader is code, of which nothing is copied
            _write_tokenizer(folder)
        for name in _CLEANED:
            _forget_origin(folder / name)
    return {
        "architecture": outline.config.family,
        "dtype": export.config["dtype"],
        "tensors": len(export.tensors),
        "files": files,
        "bytes": export.nbytes,
    }


def _write_tokenizer(folder: Path) -> None:
    """Puts a `tokenizer.json` in the place of a folder's tiktoken file."""
    tokenizer = load_tokenizer(folder)
    (folder / TIKTOKEN_FILE).unlink()
    tokenizer.save_pretrained(folder)


def _forget_origin(path: Path) -> None:
    """Takes out of a copied configuration file where its maker's machine had it."""
    if not path.exists():
        return
    config = read_json(path)
    kept = without_origin(config)
    if kept != config:
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_gguf(args: Arguments, outline: Outline, draft: Draft | None) -> dict[str, Any]:
    if draft is None:
        export = gguf.export_target(args.model, outline, args.dtype)
    elif args.kind == "adapter":
        export = gguf.export_adapter(args.model, outline, draft, args.dtype)
    else:
        export = gguf.export_draft_model(args.model, outline, draft, args.dtype)
    check_room(args.out.absolute().parent, export.nbytes)
    for warning in export.warnings:
        say(f"dejax: warning: {warning}")
    make_folder(args.out.absolute().parent)
    with progress("export", export.nbytes / _MB, "MB") as bar:
        export.write(args.out, lambda count: bar.advance(count / _MB))
    return {
        "architecture": export.architecture,
        "dtype": export.dtype,
        "tensors": len(export.tensors),
        "bytes": args.out.stat().st_size,
        "warnings": export.warnings,
    }


def _show(done: dict[str, Any]) -> None:
    columns = ["layers", "width", "tensors"]
    if "architecture" in done:
        columns = ["as", "architecture", "dtype", "tensors"]
    row = [done[key] for key in columns]
    print_table(str(done["out"]), [*columns, "size"], [[*row, format_bytes(done["bytes"])]])
