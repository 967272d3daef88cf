"""A step on a mesh is the step of one device, and nothing large is whole on each of them."""

from dataclasses import replace

import pytest

from dejax.errors import UsageError
from dejax.sharding import MeshConfig, abstract_mesh, check_divides, make_mesh, own_rows
from tests.infer.random_target import SHAPES
from tests.train.mesh_cases import CASES
from tests.train.on_devices import on_devices
from train.distill_config import DistillConfig, check_shape

SMALL = DistillConfig(seq_len=16, batch_size=8)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What `mesh_cases.measure` found on eight devices."""
    result = tmp_path_factory.mktemp("mesh") / "found.json"
    return on_devices(8, "tests.train.mesh_cases", "measure", result=result)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_and_draft_are_those_of_one_device(measured, name):
    found = measured["differences"][name]
    assert {"loss", "kl", "token", "residual", "router", "grad_norm"} <= set(found)
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
def test_an_accumulated_step_is_the_mean_of_its_parts_by_tokens(measured):
    assert len(measured["accumulated"]) == 7
    for name, (found, expected) in measured["accumulated"].items():
        assert found == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_the_head_stays_split_and_experts_stay_where_they_are(measured):
    mesh, one = measured["whole"]["mesh"], measured["whole"]["one"]
    assert one["head"] and one["all experts of a layer"]  # what is looked for can be seen
    assert not mesh["head"] and not mesh["all experts of a layer"]
    assert mesh["part of the head"] and mesh["an expert group's part of a layer"]


@pytest.mark.slow
def test_memory_holds_no_logits_of_all_tokens(measured):
    (short, wide), (long, both) = measured["bytes"]
    together = both - wide - long + short  # what grows with tokens times vocabulary
    rows, columns = 1024, (16384 - 1024) // 4  # a device's more tokens, and its more of the head
    # Less than nothing where the two dimensions make different phases of the step the largest.
    assert together < 0.02 * 4 * rows * columns
    assert wide > short and long > short


@pytest.mark.slow
def test_no_layer_leaves_a_copy_of_its_experts(measured):
    for few, many in measured["layers"]:
        assert many - few < 4 * 3 * 2**20 / 4  # a quarter of the experts of four layers


@pytest.mark.slow
def test_simulated_rounds_are_those_of_one_device(measured):
    mesh, one = measured["simulated"]
    assert mesh == one and sum(len(prompt) for prompt in one) > 6


# --- meshes that do not fit ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(fsdp=3), "vocabulary 64 over fsdp x expert x tensor = 3, width 32 over fsdp = 3"),
        (dict(expert=16), "routed experts 8 over expert x fsdp = 16"),
        (dict(tensor=4), "attention heads 2 over tensor = 4"),
        (dict(tensor=32), "neurons of an expert 16 over tensor = 32"),
        (dict(tensor=32), "neurons of the shared experts 16 over tensor = 32"),
        (dict(tensor=32), "neurons of a dense layer 48 over tensor = 32"),
    ],
)
def test_every_dimension_that_a_mesh_does_not_divide_is_named(axes, message):
    config = replace(SHAPES["shared"], vocab_size=64)
    with pytest.raises(UsageError) as error:
        check_divides(config, abstract_mesh(MeshConfig(data=1, **axes)))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("mesh: does not divide the target: ")
    check_divides(config, abstract_mesh(MeshConfig(data=8, fsdp=2, expert=2, tensor=2)))


@pytest.mark.parametrize(
    ("changes", "axes", "message"),
    [
        (dict(batch_size=6), dict(data=4), "batch_size is 6; expected a multiple of 4"),
        (dict(accumulate=4), dict(data=4), "expected a multiple of 16: rows are split over 4"),
        (dict(), dict(data=2, fsdp=2, expert=4), "expected a multiple of 16: rows are split"),
        (dict(), dict(data=1, tensor=4), "attention heads 2 over tensor = 4"),
        (dict(seq_len=999), dict(data=1), "seq_len is 999; expected at most the target's 320"),
    ],
)
def test_a_batch_that_a_mesh_does_not_divide_is_refused(changes, axes, message):
    mesh = abstract_mesh(MeshConfig(**axes))
    with pytest.raises(UsageError, match=message):
        check_shape(replace(SMALL, **changes), SHAPES["shared"], mesh)
    check_shape(SMALL, SHAPES["shared"], abstract_mesh(MeshConfig(data=4, tensor=2)))


def test_a_mesh_takes_exactly_the_devices_there_are():
    with pytest.raises(UsageError, match="data 2 x fsdp 1 x expert 1 x tensor 1 is not 1, the num"):
        make_mesh(MeshConfig(data=2))
    with pytest.raises(UsageError, match="expected data 0 or more, the others at least 1"):
        MeshConfig(fsdp=0)
    assert own_rows(make_mesh(), 8) == range(8)
