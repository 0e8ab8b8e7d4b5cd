"""Every option works with every kind of call, on ranks and without a job, in training and evaluation."""

import copy
from functools import partial

import pytest
import torch

from bagua_syncbn import recalibrate_statistics
from tests.helpers.cases import CLASSES, SHAPES_IN_LAYOUTS, WAYS, Case, call_of, check, run_reference
from tests.helpers.checkpoints import CHECKPOINTED
from tests.helpers.formula import values_of
from tests.helpers.options import OTHER

OPTIONS = {
    **{name: {"options": {name: value}} for name, value in OTHER._asdict().items()},
    "average": {"options": {"momentum": None}},
    "eps_mode": {"options": {"eps_mode": "clamp", "eps": 2.0}},  # above some of the variances
    "skip_nonfinite": {"options": {"skip_nonfinite": True}, "spoiled": True},
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
            # Outputs with a residual are not recomputed.
            residual = "activation" in name and way not in (*CLASSES, "recomputed")
            given = {"way": way, "evaluates": evaluates, "steps": steps, "residual": residual, "checkpoint": checkpoint}
            yield Case(splits, (3, 2, 5), torch.float64, **given, **options)


@pytest.mark.reference_too
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("compiled", "replicas")])
def test_every_option_works_with_every_kind_of_call(pool, way):
    check(pool, *cases(way, (2, 0, 3)))


@pytest.mark.all_rows  # `make test` compiles options in test_compile.py, test_masks.py and test_freeze.py
@pytest.mark.parametrize("splits", [(2, 0, 3), (4,)])
def test_every_option_works_in_compiled_code(pool, splits):
    check(pool, *cases("compiled", splits))


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
        before, outputs = copy.deepcopy(layer.state_dict()), []
        recalibrate_statistics(layer, batches, forward=lambda batch, call=call, to=outputs: to.append(call(*batch)))
        values = torch.cat([values_of(input, mask) for input, _, mask in batches])
        moved = {} if "statistics" in case.frozen else {"running_mean": values.mean(0), "running_var": values.var(0)}
        expected = before | moved, [step["output"] for step in run_reference(case)[0]["steps"]]
        torch.testing.assert_close(
            (layer.state_dict(), outputs), expected, msg=lambda text, case=case: f"{case}: {text}"
        )
