"""Writes the table of `docs/families.md`: every configuration beside `transformers`.

python -m tests.families.table
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from dejax.ckpt.hf_weights import checkpoint_tensors
from tests.families.configurations import CONFIGS
from tests.families.parity import Case, difference

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- table: python -m tests.families.table -->", "<!-- end of table -->"


def goes_back(case) -> bool:
    """Whether the tensors, written out again, are the checkpoint's byte for byte."""
    assert case.target.routed is not None
    ours = checkpoint_tensors(case.target.config, case.target.model, case.target.routed)
    with safe_open(case.folder / "model.safetensors", "pt") as file:
        theirs = {key: file.get_tensor(key).view(torch.uint8).numpy() for key in file.keys()}
    return ours.keys() == theirs.keys() and all(
        ours[key].tobytes() == theirs[key].tobytes() for key in ours
    )


def row(name: str) -> str:
    """One configuration's line."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(name, Path(folder) / "m")
        back = goes_back(case)
    same = bool((case.ours.argmax(-1) == case.logits.argmax(-1)).all())
    experts = all(np.array_equal(case.our_ids[layer], ids) for layer, ids in case.ids.items())
    chosen = ("yes" if experts else "**no**") if case.ids else "-"
    shown = [CONFIGS[name]["model_type"], name, f"{difference(case.ours, case.logits):.1e}"]
    shown += ["yes" if same else "**no**", chosen, "yes" if back else "**no**"]
    return f"| {' | '.join(shown)} |"


def main() -> None:
    """Measures all configurations and puts the table in its place."""
    head = "| family | configuration | difference | same token | same experts | back |"
    table = "\n".join([head, "| --- | --- | ---: | --- | --- | --- |", *map(row, CONFIGS)])
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    text = f"{before}{BEGIN}\n{table}\n{END}{after}"
    DOCUMENT.write_text(text, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
