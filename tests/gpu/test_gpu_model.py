"""What the launch geometry promises on the inputs of ``make gpu``: that it gets worse is seen without a GPU."""

import shutil

import pytest

from benchmarks.gpu import model, shapes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
A100, _, H200 = model.CARDS


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    program = model.compile_geometry(tmp_path_factory.mktemp("geometry"))
    return model.launches(program, shapes.cases(shapes.NETWORKS))


def test_a_tensor_with_the_values_for_it_fills_the_card(launches):
    """Two blocks a multiprocessor, where each of their threads would have 64 bytes to load."""
    enough = 2 * A100.multiprocessors * 256 * 64
    few = {f"{op} {case}": n.blocks for (case, op), n in launches.items() if case.size >= 1.2 * enough}
    assert len(few) > 100
    assert {key: blocks for key, blocks in few.items() if blocks < 2 * A100.multiprocessors} == {}


def test_vectors_are_16_bytes(launches):
    for (case, op), launch in launches.items():
        width = 16 // shapes.VALUE_BYTES[case.dtype]
        values = case.channels if case.layout == "interleaved" else case.shape[-1] ** (len(case.shape) - 2)
        if values % width == 0:
            assert launch.width == width, (op, case)


def test_predictions(launches):
    predicted = {key: model.predict(*key, launch, H200) for key, launch in launches.items()}
    assert max(prediction.rounds for prediction in predicted.values()) <= 8
    assert min(model.predict(*key, launch, A100).resident for key, launch in launches.items()) >= 1
    # Of copying as many bytes, and from 100 MB on of copying many more.
    least = {
        "stats": (0.58, 0.84),
        "elemt": (0.91, 0.95),
        "backward_reduce": (0.74, 0.91),
        "backward_elemt": (0.98, 0.95),
    }
    for (case, op), prediction in predicted.items():
        assert case.size < 8e6 or prediction.of_copy >= least[op][0], (op, case)
        assert case.size < 100e6 or prediction.share >= least[op][1], (op, case)
    # Planar half-precision images, as detectors have them: of copying on the card with the most bandwidth.
    bounds = {
        (8, 64, 56, 56): (0.13, 0.40, 0.25, 0.50),
        (8, 64, 160, 160): (0.52, 0.84, 0.75, 0.88),
        (32, 2048, 7, 7): (0.36, 0.55, 0.58, 0.67),
        (32, 1024, 14, 14): (0.49, 0.68, 0.73, 0.80),
    }
    for shape, shares in bounds.items():
        (network,) = {case.network for case, _ in launches if case.shape == shape}
        case = shapes.Case(network, shape, "float16", "planar")
        for op, bound in zip(shapes.PASSES, shares, strict=True):
            assert predicted[case, op].share >= bound, (op, case)


def test_kernels_with_an_activation_and_with_a_mask(tmp_path):
    """Beside copying as many bytes, in half precision from 8 MB on."""
    least = {"act_elemt": 0.70, "act_backward_reduce": 0.73, "act_backward_elemt": 0.70}
    least |= {"masked_stats": 0.51, "masked_elemt": 0.77, "masked_backward_reduce": 0.66, "masked_backward_elemt": 0.93}
    chosen = [case for case in shapes.cases(shapes.NETWORKS) if case.dtype == "float16" and case.size >= 8e6]
    program = model.compile_geometry(tmp_path)
    for (case, op), launch in model.launches(program, chosen, least).items():
        assert model.predict(case, op, launch, H200).of_copy >= least[op], (op, case)


def test_a_worse_geometry_is_predicted_to_be_slower(launches):
    for (case, op), launch in launches.items():
        share = model.predict(case, op, launch, H200).share
        assert 0 < share <= 1
        fewer = launch._replace(blocks=-(-launch.blocks // 8), slots=8 * launch.slots)
        assert model.predict(case, op, fewer, H200).share <= share or launch.blocks > 2 * H200.multiprocessors
