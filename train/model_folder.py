"""A trained or upcycled model as a Hugging Face folder, with what belongs beside the weights."""

import tempfile
from pathlib import Path
from typing import Any

from dejax.ckpt.hf_weights import write_checkpoint
from dejax.model import Transformer
from infer.convert import copy_companions
from infer.output import write_json


def write_model_folder(
    out: Path,
    raw: dict[str, Any],
    model: Transformer,
    routed: dict[int, Any],
    *,
    dtype: Any,
    source: Path | Any,
    record: tuple[str, Any] | None = None,
    replace: bool = False,
) -> None:
    """Writes a folder, whole or not at all.

    Args:
      raw: content of `config.json`; model, routed, dtype, replace: as for `write_checkpoint`.
      source: the folder whose tokenizer files it gets, or a tokenizer.
      record: name and content of a JSON file that tells how it was made.

    Raises:
      UsageError: the folder exists already, and is not to be replaced.
    """
    with tempfile.TemporaryDirectory() as beside:
        Path(beside).chmod(0o755)  # the copy has its mode, which is for the owner alone
        if isinstance(source, Path):
            copy_companions(source, Path(beside))
        else:
            source.save_pretrained(beside)
        if record is not None:
            write_json(Path(beside) / record[0], record[1])
        write_checkpoint(
            out, raw, model, routed, dtype=dtype, tokenizer=Path(beside), replace=replace
        )
