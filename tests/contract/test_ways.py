"""Every option works with every kind of call, on ranks and without a job, in training and evaluation."""

import copy
from functools import partial

import pytest
import torch

from bagua_syncbn import recalibrate_statistics
from tests.helpers.cases import CLASSES, SHAPES_IN_LAYOUTS, WAYS, Case, call_of, check
from tests.helpers.checkpoints import CHECKPOINTED
from tests.helpers.formula import values_of

OPTIONS = {
    "eps": {"options": {"eps": 0.5}},
    "momentum": {"options": {"momentum": 0.3}},
    "average": {"options": {"momentum": None}},
    "eps_mode": {"options": {"eps_mode": "clamp", "eps": 2.0}},  # above some of the variances
    "skip_nonfinite": {"options": {"skip_nonfinite": True}, "spoiled": True},
    "activation": {"options": {"activation": ("leaky_relu", 0.2)}},
    "frozen": {"frozen": ("statistics",)},
    "frozen parameters": {"frozen": ("weight", "bias")},
    "mask": {"masks": "random"},
    "zero_masked": {"masks": "random", "zero_masked": True},
    "zero_masked activation": {"masks": "random", "zero_masked": True, "options": {"activation": "gelu"}},
}


def cases(way, splits, evaluates=True, checkpoint=""):
    for name, options in OPTIONS.items():
        if not ("masks" in options and way == "replicas"):
            # An additional step if the last training step has an infinite value.
            steps = 2 + evaluates + (name == "skip_nonfinite")
            residual = "activation" in name and way not in CLASSES
            given = {"way": way, "evaluates": evaluates, "steps": steps, "residual": residual, "checkpoint": checkpoint}
            yield Case(splits, (3, 2, 5), torch.float64, **given, **options)


# `make test` compiles options in test_compile.py, test_masks.py and test_freeze.py.
MARKS = {"compiled": pytest.mark.all_rows}
ON_RANKS = [pytest.param(way, marks=MARKS.get(way, pytest.mark.reference_too)) for way in WAYS if way != "replicas"]


@pytest.mark.parametrize("way", ON_RANKS)
def test_every_option_works_with_every_kind_of_call(pool, way):
    given = list(cases(way, (2, 0, 3), evaluates=way != "compiled"))
    check(pool, *(given[::2] if way == "compiled" else given))  # a compilation takes a second


@pytest.mark.reference_too
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compiled"])
def test_every_option_works_without_a_job(way, single_threaded):
    check(None, *cases(way, (4,)))


@pytest.mark.parametrize(("checkpoint", "way"), [
    *((checkpoint, "forward") for checkpoint in CHECKPOINTED),
    *((checkpoint, "own F.batch_norm") for checkpoint in ("reentrant", "non-reentrant", "own")),
    ("reentrant", "function"),
    ("non-reentrant", "recomputed"),
])  # fmt: skip
def test_recomputation_uses_the_original_call(pool, checkpoint, way):
    check(pool, *cases(way, (2, 0, 3), checkpoint=checkpoint))


def test_higher_derivatives_work_with_recomputation(pool):
    ways = "checkpointed", "recomputed"
    check(pool, *(Case((2, 0, 3), (3, 4), torch.float64, way=way, order=3) for way in ways))


def test_replicas_accept_all_dtypes_layouts_frozen_tensors_and_derivatives(single_threaded):
    replicas = partial(Case, (5,), way="replicas")
    pairs = [(torch.float64, None), *((dtype, torch.float32) for dtype in (torch.float32, torch.float16))]
    frozen = ("input",), ("weight", "bias"), ("input", "weight")
    options = {"affine": False}, {"eps_mode": "clamp", "eps": 2.0}, {"activation": "silu"}
    check(
        None,
        *(replicas(shape[1:], *pair, layout=layout) for shape, layout in SHAPES_IN_LAYOUTS for pair in pairs),
        *(replicas((3, 4), torch.float64, frozen=names) for names in frozen),
        Case((2,), (3,), torch.float64, way="replicas"),  # one value per channel
        *(replicas((3, 4), torch.float64, options=given, residual="activation" in given, order=3) for given in options),
    )


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("function", "compiled")])
def test_recalibration_works_with_every_option(way, single_threaded):
    for case in cases(way, (4,), evaluates=False):
        if case.spoiled:
            continue
        layer = case.layer()
        call, steps = call_of(case, layer), [(*case.batch(step)[:2], case.mask(step)) for step in range(case.steps)]
        batches = [(input, residual if case.residual else None, mask) for input, residual, mask in steps]
        call(*batches[0])
        before = copy.deepcopy(layer.state_dict())
        recalibrate_statistics(layer, batches, forward=lambda batch, call=call: call(*batch))
        values = torch.cat([values_of(input, mask) for input, _, mask in batches])
        expected = before | {"running_mean": values.mean(0), "running_var": values.var(0)}
        expected = before if "statistics" in case.frozen else expected
        torch.testing.assert_close(layer.state_dict(), expected, msg=lambda text, case=case: f"{case}: {text}")
