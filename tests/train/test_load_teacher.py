"""A folder's weights straight to a mesh: the arrays of `load_target`, and never all on the host."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dejax.sharding import MeshConfig, make_mesh, on_host
from dejax.target import load_target
from infer.convert import convert
from tests.families.random_folder import raw_config, write_folder
from tests.train.on_devices import on_devices
from train.teacher import as_teacher, load_teacher, one_device

FOLDERS = {
    "an expert a tensor": ("lite", None),
    "groups, all experts of a layer fused": ("gpt-oss", None),
    "dense layers between, tied": ("qwen3-moe-sparse", None),
    "a store": ("lite", "same"),
    "a store of fp8": ("lite", "fp8"),
}


def make_folder(parent: Path, name: str) -> Path:
    """A folder of `FOLDERS`, converted if it is a store."""
    configuration, experts = FOLDERS[name]
    folder = write_folder(parent / "model", raw_config(configuration))
    if experts is None:
        return folder
    convert(folder, parent / "store", experts=None if experts == "same" else experts)
    return parent / "store"


def unequal(path: str | Path, mesh, dtype: str) -> list[str]:
    """The arrays that `load_teacher` and `as_teacher(load_target(...))` have otherwise."""
    loaded = load_teacher(path, mesh, dtype=dtype)
    target = load_target(path, dtype=dtype)
    if target.store is not None:  # whose experts a target decodes as they are stored
        layers = target.config.moe_layers
        held = {layer: target.layer_experts(layer).astype(dtype) for layer in layers}
        target = replace(target, routed=held, store=None)
    expected = as_teacher(target, mesh)
    assert loaded.identity == expected.identity and loaded.dtype == expected.dtype
    assert loaded.definition.config == expected.definition.config
    assert jax.tree.structure(loaded.params) == jax.tree.structure(expected.params)
    found = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(loaded.params),
        jax.tree.leaves(expected.params),
        strict=True,
    )
    for (place, one), other in pairs:
        same = one.dtype == other.dtype and one.sharding == other.sharding
        if not (same and np.array_equal(on_host(one), on_host(other))):
            found.append(jax.tree_util.keystr(place))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FOLDERS)
def test_arrays_are_those_of_load_target(tmp_path, name, dtype):
    assert unequal(make_folder(tmp_path, name), one_device(), dtype) == []


def unequal_on_eight(parent: str) -> dict[str, list[str]]:
    """`unequal` of every folder under `parent`, on a mesh of eight devices."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))
    return {folder.name: unequal(folder, mesh, "float32") for folder in Path(parent).iterdir()}


@pytest.mark.slow
def test_arrays_are_those_of_load_target_on_eight_devices(tmp_path):
    folders = tmp_path / "folders"
    folders.mkdir()
    for number, name in enumerate(FOLDERS):
        (tmp_path / str(number)).mkdir()
        make_folder(tmp_path / str(number), name).rename(folders / str(number))
    found = on_devices(
        8, __name__, "unequal_on_eight", str(folders), result=tmp_path / "found.json"
    )
    assert found == {str(number): [] for number in range(len(FOLDERS))}


@pytest.mark.slow
def test_a_host_holds_a_few_layers_of_experts_at_most(tmp_path):
    layers = 24
    raw = raw_config("lite", num_hidden_layers=layers, moe_intermediate_size=128)
    folder = write_folder(tmp_path / "model", raw)
    layer = 8 * 3 * 128 * 64 * 4  # bytes of its experts
    load_teacher(folder, one_device())  # what is imported and compiled is no weight
    tracemalloc.start()
    try:
        teacher = load_teacher(folder, one_device())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert teacher.params.routed.nbytes == (layers - 1) * layer
    # A CPU's arrays may be the host's: the resident ones count, the experts are copied away.
    resident = sum(a.nbytes for a in jax.tree.leaves((teacher.params.outer, teacher.params.layers)))
    assert peak - resident < 5 * layer < teacher.params.routed.nbytes / 4
