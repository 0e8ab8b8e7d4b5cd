"""The contract: W ranks give the output, the gradients and the running statistics of one process on all batches."""

import pytest
import torch
from cases import Case, run_rank, run_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES, assert_close

pytestmark = pytest.mark.reference_too

SPLITS = [
    (5,),
    *((3, 3), (1, 6), (0, 4)),
    *((2, 2, 2), (4, 1, 2), (3, 0, 2)),
    *((2, 2, 2, 2), (1, 3, 2, 5), (0, 2, 0, 3)),
]
SHAPES = [
    ((3,), "contiguous"),
    ((4,), "sliced"),
    ((3, 5), "contiguous"),
    ((3, 5), "transposed"),
    ((6, 4, 3), "contiguous"),
    ((6, 4, 3), "channels_last"),
    ((5, 3, 4), "sliced"),
    ((2, 3, 4, 2), "contiguous"),
    ((2, 3, 4, 2), "channels_last_3d"),
]
# As many as shapes, the precise ones more often.
DTYPES = [
    (torch.float64, None),
    (torch.float32, None),
    (torch.float64, None),
    (torch.float16, None),
    (torch.float64, None),
    (torch.bfloat16, None),
    (torch.float32, None),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]
# Every split with every shape, every shape with every dtype, and every dtype with every split; the fewest ranks first.
GRID = [
    (split, shape, DTYPES[(i + j) % len(DTYPES)]) for i, split in enumerate(SPLITS) for j, shape in enumerate(SHAPES)
]


def check(pool, case):
    ranks = pool.run(run_rank, len(case.splits), case)
    reference = run_reference(case)
    for step in range(case.steps):
        parts = zip(
            ranks, *(reference[key][step].split(case.splits) for key in ("outputs", "input_grads")), strict=True
        )
        for rank, (result, output, input_grad) in enumerate(parts):
            assert_close(result["outputs"][step], output, f"output of rank {rank} at step {step}")
            if "input" in case.frozen:
                assert result["input_grads"][step] is None
            else:
                assert_close(result["input_grads"][step], input_grad, f"input.grad of rank {rank} at step {step}")
        for name, expected in reference["parameter_grads"][step].items():
            grads = [result["parameter_grads"][step][name] for result in ranks]
            if name in case.frozen:
                assert grads == [None] * len(ranks)
                continue
            # Each rank rounds its share, and the shares may cancel: the error is relative to what is added up.
            scale = sum(grad.double().abs() for grad in grads) + 1
            error = ((sum(grad.double() for grad in grads) - expected) / scale).abs().max()
            assert error <= TOLERANCES[grads[0].dtype][0], f"{name}.grad at step {step} is off by {error:.1e}"
    for name, expected in reference["buffers"].items():
        buffers = [result["buffers"][name] for result in ranks]
        if name == "num_batches_tracked":
            assert buffers == [expected] * len(ranks)
            continue
        assert_close(buffers[0], expected, name, roundings=1 + case.steps)
        for buffer in buffers[1:]:
            assert torch.equal(buffer, buffers[0]), f"{name} differs between ranks"
    assert set(ranks[0]["buffers"]) == set(reference["buffers"])


@pytest.mark.parametrize(("splits", "shape_and_layout", "dtypes"), GRID, ids=str)
def test_ranks_equal_one_process(pool, splits, shape_and_layout, dtypes):
    shape, layout = shape_and_layout
    check(pool, Case(splits, shape, *dtypes, layout))


@pytest.mark.parametrize("options", [
    {"momentum": None},
    {"momentum": None, "dtype": torch.float16},
    {"momentum": 0.0},
    {"eps": 0.1},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"frozen": ("input",)},
    {"frozen": ("weight",)},
    {"frozen": ("weight", "bias")},
    {"frozen": ("input", "weight", "bias")},
    {"affine": False, "frozen": ("input",)},
    {"dtype": torch.float32, "parameter_dtype": torch.float16},
    {"dtype": torch.float32, "parameter_dtype": torch.bfloat16},
    {"dtype": torch.float64, "parameter_dtype": torch.float32},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("splits", [(5,), (1, 6), (3, 0, 2)], ids=str)
def test_ranks_equal_one_process_with_each_option(pool, splits, options):
    check(pool, Case(splits, **{"shape": (3, 4, 2), "steps": 3, "dtype": torch.float64} | options))


@settings(max_examples=40)
@given(data=st.data())
def test_ranks_equal_one_process_in_drawn_cases(pool, data):
    splits = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), "splits")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), "shape")
    values = sum(splits)
    for size in shape[1:]:
        values *= size
    if values < 2:
        return  # no variance: see test_semantics
    dtype, parameter_dtype = data.draw(st.sampled_from([(torch.float64, None), (torch.float32, None)]), "dtype")
    layouts = [
        "contiguous",
        "transposed",
        "sliced",
        *{3: ["channels_last"], 4: ["channels_last_3d"]}.get(len(shape), []),
    ]
    case = Case(
        splits,
        shape,
        dtype,
        parameter_dtype,
        layout=data.draw(st.sampled_from(layouts), "layout"),
        momentum=data.draw(st.sampled_from([0.1, 0.5, None]), "momentum"),
        # Two values can be so close that eps alone keeps the gradient small: make the comparison well-conditioned.
        eps=1e-1,
        affine=data.draw(st.booleans(), "affine"),
        track_running_stats=data.draw(st.booleans(), "track_running_stats"),
    )
    check(pool, case)
