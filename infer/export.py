"""Writes a target or draft experts for other programs: `dejax export MODEL --format F --out P`.

`safetensors` is dejax's own adapter folder (see `dejax.ckpt.draft_state`), checked against MODEL
and written anew; with `--draft init:SEED` it is that of untrained draft experts. `gguf` is a file
for llama.cpp (see `dejax.export.gguf`): the target, the draft experts, or both as one model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from dejax.ckpt.draft_state import check_draft_folder, draft_tensors, resolve_draft, save_draft
from dejax.errors import UsageError
from dejax.export import gguf
from dejax.export.gguf_file import gguf_package
from dejax.target import Outline, read_outline
from infer.arguments import (
    DraftSpec,
    Model,
    OutputFile,
    ParsedBy,
    Positional,
    did_you_mean,
    parse,
)
from infer.console import print_table, progress, say
from infer.output import check_output, check_output_folder, check_room, make_folder, report
from infer.units import format_bytes

FORMATS = ("safetensors", "gguf")
LATER = ("torch",)
_MB = 1e6

Kind = Literal["target", "adapter", "draft-model"]


def export_format(text: str) -> str:
    """`--format`: one that this version writes."""
    if text in LATER:
        raise UsageError(f"{text} is not available in this version; use safetensors or gguf")
    if text not in FORMATS:
        hint = did_you_mean(text, FORMATS + LATER)
        raise UsageError(f"{text!r} is unknown; expected safetensors or gguf{hint}")
    return text


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax export`."""

    model: Positional[Model]
    """A Hugging Face folder, a converted folder, or tiny."""
    out: Annotated[Path, ParsedBy(Path, "PATH")]
    """safetensors: folder to write; an adapter that is there is replaced. gguf: file to write."""
    draft: DraftSpec | None = None
    """Draft experts: a folder from `dejax distill`, or untrained ones. safetensors needs them."""
    format: Annotated[str, ParsedBy(export_format, "FORMAT")] = "safetensors"
    """What to write: safetensors, dejax's adapter folder, or gguf, a file for llama.cpp."""
    as_: Kind | None = None
    """gguf: the target (default without --draft), the draft experts alone (adapter, default with
    --draft), or the drafter as a model of its own (draft-model)."""
    dtype: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4"] | None = None
    """gguf: what tensors are stored as; by default as in MODEL, and f32 for an adapter."""
    json: OutputFile | None = None
    """Write what was done here as JSON; - is standard output."""

    def __post_init__(self):
        if self.format == "gguf":
            if self.kind == "target" and self.draft is not None:
                raise UsageError("--as target writes no draft experts; leave --draft out")
            if self.kind != "target" and self.draft is None:
                raise UsageError(f"--draft is missing: --as {self.kind} writes draft experts")
            return
        if self.draft is None:
            raise UsageError("--draft is missing: safetensors is the format of draft experts")
        for flag, value in (("--as", self.as_), ("--dtype", self.dtype)):
            if value is not None:
                raise UsageError(f"{flag} is for --format gguf; safetensors has one form")

    @property
    def kind(self) -> Kind:
        """What a GGUF file is to hold."""
        return self.as_ or ("target" if self.draft is None else "adapter")


def main(argv: list[str]) -> int:
    """Runs `dejax export`."""
    about = "Write a target, or draft experts checked against it, for other programs."
    args = parse(Arguments, argv, prog="dejax export", description=about)
    _check_out(args)
    outline = read_outline(args.model)
    done = _write_gguf(args, outline) if args.format == "gguf" else _write_adapter(args, outline)
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
    except UsageError as error:
        raise UsageError(f"--out: {error}") from None
    if args.format != "gguf":
        check_draft_folder(args.out)


def _write_adapter(args: Arguments, outline: Outline) -> dict[str, Any]:
    draft = resolve_draft(str(args.draft), outline)
    tensors = draft_tensors(draft)
    return {
        "out": save_draft(args.out, draft, outline.config),
        "format": args.format,
        "target": outline.identity,
        "layers": len(draft.experts),
        "width": draft.config.width,
        "top_r": draft.config.top_r,
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }


def _write_gguf(args: Arguments, outline: Outline) -> dict[str, Any]:
    draft = None if args.draft is None else resolve_draft(str(args.draft), outline)
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
        "out": args.out,
        "format": args.format,
        "as": args.kind,
        "target": outline.identity,
        "architecture": export.architecture,
        "dtype": export.dtype,
        "tensors": len(export.tensors),
        "bytes": args.out.stat().st_size,
        "warnings": export.warnings,
    }


def _show(done: dict[str, Any]) -> None:
    size = format_bytes(done["bytes"])
    if done["format"] == "gguf":
        row = [done[key] for key in ("as", "architecture", "dtype", "tensors")]
        columns = ["as", "architecture", "dtype", "tensors", "size"]
    else:
        row = [done["layers"], done["width"], done["tensors"]]
        columns = ["layers", "width", "tensors", "size"]
    print_table(str(done["out"]), columns, [[*row, size]])
