"""The contract: W ranks compute the output, gradients and running statistics of one process on the whole batch."""

import itertools
import random

import pytest
import torch

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
    """Yields masks of all kinds in all layouts, with all options that depend on masks."""
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
    """With ``zero_masked``, input, residual and gradient are NaN at masked positions."""
    check(pool, *masked_cases(splits, zero_masked))


def drawn_cases(ranks):
    draw = random.Random(ranks)
    for _ in range(15):
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 4)))
        splits = (*(draw.randint(0, 6) for _ in range(ranks - 1)), draw.randint(2, 6))  # fewer values have no variance
        options = {"momentum": draw.choice([0.1, 0.5, None]), "affine": draw.random() < 0.5}
        options |= {"track_running_stats": draw.random() < 0.5, "activation": draw.choice([None, None, "silu", "tanh"])}
        yield Case(
            splits,
            shape,
            draw.choice([torch.float64, torch.float32]),
            layout=draw.choice(["contiguous", "transposed", "sliced", *CHANNELS_LAST.get(len(shape), [])]),
            # Two values can be so close that eps alone keeps the gradient small: make the comparison well-conditioned.
            options={"eps": 0.1} | {name: value for name, value in options.items() if name != "activation" or value},
            residual=draw.random() < 0.5,
            masks=draw.choice(["", "", "random", *["lengths"] * (len(shape) > 1)]),
        )


CHANNELS_LAST = {3: ["channels_last"], 4: ["channels_last_3d"]}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_equal_one_process_in_drawn_cases(pool, ranks):
    check(pool, *drawn_cases(ranks))
