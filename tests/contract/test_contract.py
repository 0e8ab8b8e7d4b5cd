"""The contract: W ranks compute the same output, gradients and running statistics as one process on the whole batch."""

import itertools
import random

import pytest
import torch

from tests.helpers.cases import CLASSES, Case, check
from tests.helpers.checkpoints import CHECKPOINTED
from tests.helpers.rows import rows
from tests.helpers.tolerances import DTYPES

SPLITS = [(3, 3), (1, 6), (0, 4), (2, 2, 2), (4, 1, 2), (3, 0, 2), (1, 3, 2, 5), (0, 2, 0, 3)]
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
# Dtypes of input and parameters; None for the same dtype.
DTYPE_PAIRS = [*((dtype, None) for dtype in DTYPES), *((dtype, torch.float32) for dtype in DTYPES[2:])]
MIXED = [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float64, torch.float32)]


@pytest.mark.reference_too
@pytest.mark.parametrize("splits", rows(SPLITS, [(1, 6), (3, 0, 2), (1, 3, 2, 5)]), ids=str)
def test_ranks_equal_one_process(groups, splits):
    shapes = zip(SHAPES, itertools.cycle(DTYPE_PAIRS))
    check(groups, *(Case(splits, shape, *dtypes, layout) for (shape, layout), dtypes in shapes))
    check(groups, *(Case(splits, shape, torch.float64, layout=layout) for shape, layout in SHAPES))


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
    *({"dtype": dtype, "parameter_dtype": of_parameters} for dtype, of_parameters in MIXED),
]


@pytest.mark.reference_too
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # large groups sum statistics for float32 input only
@pytest.mark.parametrize("splits", rows([(1, 6), (3, 0, 2)], [(3, 0, 2)]), ids=str)
def test_ranks_equal_one_process_with_each_option(groups, splits, dtype):
    check(groups, *(Case(splits, **{"shape": (3, 4, 2), "steps": 3, "dtype": dtype} | given) for given in OPTIONS))


@pytest.mark.reference_too
@pytest.mark.parametrize("zero_masked", [False, True])
@pytest.mark.parametrize("splits", rows([(2, 3), (2, 0, 2)], [(2, 0, 2)]), ids=str)
def test_ranks_with_masks_equal_one_process(pool, splits, zero_masked):
    """With ``zero_masked``, input, residual and gradient are NaN at masked positions."""
    given = {"dtype": torch.float64, "residual": zero_masked, "zero_masked": zero_masked, "evaluates": zero_masked}
    given |= {"options": {"activation": "gelu"} if zero_masked else {}, "steps": 2 + zero_masked}
    kinds = itertools.product(SHAPES, ("random", "padded rank"))
    check(pool, *(Case(splits, shape, layout=layout, masks=masks, **given) for (shape, layout), masks in kinds))
    check(pool, Case(splits, (3, 9), masks="random", order=2, **given))


LAYOUTS = {3: "channels_last", 4: "channels_last_3d"}  # by number of dimensions besides the samples


def draw_case(ranks, seed):
    """Returns a random case, without unsupported or ill-conditioned combinations."""
    draw = random.Random(f"{ranks} {seed}")

    def some(*values, often, unless=False):
        return often if unless or draw.random() < 0.6 else draw.choice(values)

    way = some("function", "super", "own F.batch_norm", "accumulated", "recomputed", often="forward")
    checkpoint = some(*CHECKPOINTED, often="", unless=way in ("accumulated", "recomputed"))
    if way == "own F.batch_norm" and "selective" in checkpoint:  # torch rejects in-place operations, e.g. on counters
        checkpoint = ""
    shape = tuple(draw.randint(1, 7) for _ in range(3 if way in CLASSES else draw.randint(1, 4)))
    masks = some("random", often="")
    frozen = some("weight", "bias", "statistics", *["input"] * (not checkpoint), often=None)
    tracks = bool(checkpoint) or frozen == "statistics" or draw.random() < 0.7
    activation = some("relu", "silu", "tanh", ("leaky_relu", 0.2), often=None)
    options = {
        # Two values can be so close that only eps keeps the gradient small enough to compare.
        "eps": draw.choice([0.1, 1.0]),
        "momentum": draw.choice([0.1, 0.5, None]),
        "affine": draw.random() < 0.7,
        "track_running_stats": tracks,
        "eps_mode": some("clamp", often="plus"),
        "skip_nonfinite": draw.random() < 0.5,
    } | ({"activation": activation} if activation else {})
    evaluates = tracks and draw.random() < 0.5
    dtype = some(torch.float32, often=torch.float64, unless=options["eps_mode"] == "clamp")
    layout = LAYOUTS.get(len(shape), "contiguous") if min(shape) > 1 else "contiguous"
    return Case(
        (*(draw.randint(0, 6) for _ in range(ranks - 1)), draw.randint(2, 6)),  # fewer values have no variance
        shape,
        dtype,
        layout=draw.choice(["contiguous", "transposed", "sliced", layout]),
        options=options,
        way=way,
        checkpoint=checkpoint,
        frozen=(frozen,) if frozen else (),
        residual=way not in CLASSES and draw.random() < 0.3,
        masks=masks,
        zero_masked=masks != "" and draw.random() < 0.5,
        spoiled=options["skip_nonfinite"] and draw.random() < 0.5,
        evaluates=evaluates,
        order=some(2, *[3] * (ranks > 1), often=1, unless=dtype != torch.float64 or checkpoint != ""),
        steps=3 + evaluates,
    )


@pytest.mark.parametrize("ranks", rows([1, 2, 3, 4], [2, 3]))
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)], ids=str)
def test_ranks_equal_one_process_in_drawn_cases(groups, ranks, seeds):
    for seed in range(seeds.start, seeds.stop, 20):
        check(groups, *(draw_case(ranks, number) for number in range(seed, seed + 20)))
