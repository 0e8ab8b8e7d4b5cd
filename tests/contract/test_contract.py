"""The contract: W ranks give the output, the gradients and the running statistics of one process on all batches."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cases import Case, check

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


@pytest.mark.parametrize(("splits", "shape_and_layout", "dtypes"), GRID, ids=str)
def test_ranks_equal_one_process(pool, splits, shape_and_layout, dtypes):
    shape, layout = shape_and_layout
    check(pool, Case(splits, shape, *dtypes, layout))


OPTIONS = [
    {"options": {"momentum": None}},
    {"options": {"momentum": None}, "dtype": torch.float16},
    {"options": {"momentum": 0.0}},
    {"options": {"eps": 0.1}},
    {"options": {"affine": False}},
    {"options": {"bias": False}},
    {"options": {"track_running_stats": False}},
    {"frozen": ("input",)},
    {"frozen": ("weight",)},
    {"frozen": ("weight", "bias")},
    {"frozen": ("input", "weight", "bias")},
    {"options": {"affine": False}, "frozen": ("input",)},
    {"dtype": torch.float32, "parameter_dtype": torch.float16},
    {"dtype": torch.float32, "parameter_dtype": torch.bfloat16},
    {"dtype": torch.float64, "parameter_dtype": torch.float32},
]


@pytest.mark.parametrize("splits", [(5,), (1, 6), (3, 0, 2)], ids=str)
def test_ranks_equal_one_process_with_each_option(pool, splits):
    check(pool, *(Case(splits, **{"shape": (3, 4, 2), "steps": 3, "dtype": torch.float64} | case) for case in OPTIONS))


MASKED = [{}, {"momentum": None}, {"eps_mode": "clamp", "eps": 2.0}, {"skip_nonfinite": True}, {"activation": "relu"}]
MASKED.append({"activation": "gelu", "eps_mode": "clamp", "eps": 2.0})


def masked_cases(splits, zero_masked):
    """Masks of all kinds in all layouts, and with all options that change what is counted."""
    given = {"dtype": torch.float64, "zero_masked": zero_masked, "evaluates": zero_masked, "steps": 2 + zero_masked}
    for (shape, layout), masks in itertools.product(SHAPES[::2], ("random", "padded rank", "lengths")):
        if masks != "lengths" or len(shape) > 1:
            options = {"activation": "gelu"} if zero_masked else {}
            yield Case(splits, shape, layout=layout, options=options, residual=zero_masked, masks=masks, **given)
    for masks, options, order in itertools.product(("random", "lengths"), MASKED, (1, 2)):
        yield Case(splits, (3, 9), options=options, residual="activation" in options, masks=masks, order=order, **given)
    for way in ("own F.batch_norm", "recomputed", *["compiled"] * (len(splits) == 1)):
        for masks, options in (("random", MASKED[-2]), ("lengths", MASKED[-1])):
            yield Case(splits, (3, 2, 5), options=options, masks=masks, way=way, **given)


@pytest.mark.parametrize("zero_masked", [False, True])
@pytest.mark.parametrize("splits", [(5,), (2, 3), (4, 1), (2, 0, 2)], ids=str)
def test_ranks_with_masks_equal_one_process(pool, splits, zero_masked):
    """Where the output is zero at masked positions, input, residual and gradient are NaN there."""
    check(pool, *masked_cases(splits, zero_masked))


@settings(max_examples=60)
@given(data=st.data())
def test_ranks_equal_one_process_in_drawn_cases(pool, data):
    splits = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), "splits")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), "shape")
    values = sum(splits)
    for size in shape[1:]:
        values *= size
    if values < 2:
        return  # no variance: see test_semantics
    layouts = [
        "contiguous",
        "transposed",
        "sliced",
        *{3: ["channels_last"], 4: ["channels_last_3d"]}.get(len(shape), []),
    ]
    options = {
        "momentum": data.draw(st.sampled_from([0.1, 0.5, None]), "momentum"),
        # Two values can be so close that eps alone keeps the gradient small: make the comparison well-conditioned.
        "eps": 1e-1,
        "affine": data.draw(st.booleans(), "affine"),
        "track_running_stats": data.draw(st.booleans(), "track_running_stats"),
        "activation": data.draw(st.sampled_from([None, None, "silu", "tanh"]), "activation"),
    }
    case = Case(
        splits,
        shape,
        data.draw(st.sampled_from([torch.float64, torch.float32]), "dtype"),
        layout=data.draw(st.sampled_from(layouts), "layout"),
        options={name: value for name, value in options.items() if value is not None or name == "momentum"},
        residual=data.draw(st.booleans(), "residual"),
        masks=data.draw(st.sampled_from(["", "", "random", "padded rank", *["lengths"] * (len(shape) > 1)]), "masks"),
    )
    check(pool, case)
