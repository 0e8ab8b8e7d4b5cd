"""The contract: W ranks give the output, the gradients and the running statistics of one process on all batches."""

import pytest
import torch
from cases import Case, check
from hypothesis import given, settings
from hypothesis import strategies as st

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


def masked_cases(splits):
    """Masks of all kinds in all layouts, and with all options that change what is counted."""
    for shape, layout in SHAPES[::2]:
        for masks in ("random", "padded rank", "lengths"):
            if masks != "lengths" or len(shape) > 1:
                yield Case(splits, shape, torch.float64, layout=layout, masks=masks)
    for masks in ("random", "lengths"):
        yield Case(splits, (3, 9), torch.float64, masks=masks, order=2)
        for options in ({"momentum": None}, {"eps_mode": "clamp", "eps": 2.0}, {"skip_nonfinite": True}):
            yield Case(splits, (3, 9), torch.float64, options=options, masks=masks)
        yield Case(splits, (3, 9), torch.float64, options={"activation": "gelu"}, masks=masks, residual=True)


@pytest.mark.parametrize("splits", [(5,), (2, 3), (4, 1), (2, 0, 2)], ids=str)
def test_ranks_with_masks_equal_one_process(pool, splits):
    check(pool, *masked_cases(splits))


def padded_cases(splits):
    """NaN in the padding of input, residual and gradient, in training and evaluation, in derivatives of derivatives."""
    for way in ("forward", "own F.batch_norm", "recomputed", *["compiled"] * (len(splits) == 1)):
        for activation in (None, "relu", "gelu"):
            order = 1 if way in ("compiled", "recomputed") else 2
            for residual, eps_mode in ((way != "own F.batch_norm", "plus"), (False, "clamp")):
                yield Case(
                    splits, (3, 2, 5) if way == "own F.batch_norm" else (3, 9), torch.float64, way=way,
                    options={"activation": activation, "eps": 0.5, "eps_mode": eps_mode}, residual=residual,
                    masks="random" if eps_mode == "plus" else "lengths", zero_masked=True,
                    evaluates=True, steps=3, order=order,
                )  # fmt: skip
    for layout, activation in (("contiguous", "gelu"), ("channels_last", "relu"), ("channels_last", None)):
        yield Case(
            splits, (3, 4, 5), torch.float64, layout=layout, options={"activation": activation}, residual=True,
            masks="random", zero_masked=True, evaluates=True, steps=3,
        )  # fmt: skip


@pytest.mark.parametrize("splits", [(4,), (2, 3)], ids=str)
def test_what_padding_holds_goes_nowhere(pool, splits):
    check(pool, *padded_cases(splits))


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
