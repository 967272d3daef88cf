"""What a stopped `dejax upcycle` left behind, in a folder beside the one it writes.

    OUT.unfinished/options.json           what the run was asked for
    OUT.unfinished/layer_NN.safetensors   a finished layer
    OUT.unfinished/streams.safetensors    both residual streams before the next layer, and which

The streams are replaced last: a layer is finished once they are there, and done again otherwise.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dejax.ckpt.tensor_files import read_json, write_whole
from dejax.errors import UsageError
from infer.output import make_folder, write_json
from train.upcycle_layers import LayerReport, RoutedLayer, Windows

Options = dict[str, Any]
"""Command line flag -> value, for all that the result depends on."""


STREAMS = "streams.safetensors"


def unfinished_folder(out: Path) -> Path:
    """Where a run that writes `out` keeps what it has so far."""
    return out.with_name(out.name + ".unfinished")


def finished_layers(out: Path) -> int:
    """Layers that a stopped run had finished; 0 where there was none."""
    file = unfinished_folder(out) / STREAMS
    if not file.exists():
        return 0
    with _open(file) as found:
        return _layer_of(found, file)


def _layer_of(found: Any, file: Path) -> int:
    if not {"dense", "moe"} <= set(found.keys()) or "layer" not in (found.metadata() or {}):
        raise UsageError(f"{file} is not what a run leaves behind; remove its folder")
    return int(found.metadata()["layer"])


class Unfinished:
    """A run's folder, new or left behind.

    Raises:
      UsageError: it was begun with other options.
    """

    def __init__(self, out: Path, options: Options):
        self.folder = unfinished_folder(out)
        file = self.folder / "options.json"
        if not file.exists():
            make_folder(self.folder)
            write_json(file, options)
            return
        begun = read_json(file)
        for name in begun.keys() | options.keys():
            if begun.get(name) != options.get(name):
                raise UsageError(
                    f"{self.folder} was begun with {name} {begun.get(name)}, this call has {name} "
                    f"{options.get(name)}; give what it was begun with, or remove that folder"
                )

    def restore(self, windows: Windows) -> int:
        """Puts the streams where the run was stopped; the layer to go on with (0: a new run)."""
        file = self.folder / STREAMS
        if not file.exists():
            return 0
        with _open(file) as found:
            layer = _layer_of(found, file)
            for name in ("dense", "moe"):
                stream, kept = getattr(windows, name), found.get_tensor(name)
                if (kept.shape, kept.dtype) != (stream.shape, stream.dtype):
                    raise UsageError(
                        f"{file}: {name} is {kept.dtype} {list(kept.shape)}, expected "
                        f"{stream.dtype} {list(stream.shape)}; remove its folder"
                    )
                stream[...] = kept
            return layer

    def finish_layer(
        self, layer: int, windows: Windows, routed: RoutedLayer | None, report: LayerReport | None
    ) -> None:
        """Keeps a layer (None: it stays dense) and the streams after it."""
        if routed is not None and report is not None:
            with write_whole(self._layer(layer)) as unfinished:
                arrays = {
                    field.name: _plain(getattr(routed, field.name)) for field in fields(routed)
                }
                save_file(arrays, unfinished, {"report": json.dumps(asdict(report))})
        with write_whole(self.folder / STREAMS) as unfinished:
            streams = {"dense": windows.dense, "moe": windows.moe}
            save_file(streams, unfinished, {"layer": str(layer + 1)})

    def read_layer(self, layer: int) -> tuple[RoutedLayer, LayerReport]:
        """A finished layer."""
        with _open(self._layer(layer)) as found:
            arrays = {name: found.get_tensor(name) for name in found.keys()}
            return RoutedLayer(**arrays), LayerReport(**json.loads(found.metadata()["report"]))

    def _layer(self, layer: int) -> Path:
        return self.folder / f"layer_{layer:02d}.safetensors"

    def remove(self) -> None:
        """Removes what the run has written here, and the folder."""
        for file in [*self.folder.glob("streams.*"), *self.folder.glob("layer_*.safetensors")]:
            file.unlink()
        (self.folder / "options.json").unlink()
        self.folder.rmdir()


def _plain(array: np.ndarray) -> np.ndarray:
    """In the order in memory that a file has it in."""
    return np.ascontiguousarray(array)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read ({error}); remove its folder") from None
