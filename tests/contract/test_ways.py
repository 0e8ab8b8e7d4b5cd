"""Every option works with every kind of call, on ranks and without a job, in training and evaluation."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn import recalibrate_statistics
from bagua_syncbn.communicators import LOCAL
from tests.helpers.cases import CLASSES, SHAPES_IN_LAYOUTS, WAYS, Case, call_of, check, positions_of, run_rank
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
    "zero_masked": {"masks": "lengths", "zero_masked": True},
    "zero_masked activation": {"masks": "random", "zero_masked": True, "options": {"activation": "gelu"}},
}


def cases(way, splits, evaluates=True, checkpoint=""):
    of_input_alone = way == "replicas" or checkpoint == "fairscale"
    for name, options in OPTIONS.items():
        if not ("masks" in options and of_input_alone):
            # A step more where the last one in training is spoiled.
            steps = 2 + evaluates + (name == "skip_nonfinite")
            residual = "activation" in name and way not in CLASSES and checkpoint != "fairscale"
            given = {"way": way, "evaluates": evaluates, "steps": steps, "residual": residual, "checkpoint": checkpoint}
            yield Case(splits, (3, 2, 5), torch.float64, **given, **options)


SLOW = pytest.param("compiled", marks=pytest.mark.slow)
ON_RANKS = [
    pytest.param(way, marks=() if way == "compiled" else pytest.mark.reference_too) for way in WAYS if way != "replicas"
]


@pytest.mark.parametrize("way", ON_RANKS)
def test_every_option_works_with_every_kind_of_call(pool, way):
    check(pool, *cases(way, (2, 0, 3), evaluates=way != "compiled"))


@pytest.mark.reference_too
@pytest.mark.parametrize("way", [*(way for way in WAYS if way != "compiled"), SLOW])
def test_every_option_works_without_a_job(way, single_threaded):
    check(None, *cases(way, (4,)))


REPEATED = [
    *((checkpoint, "forward") for checkpoint in CHECKPOINTED),
    *((checkpoint, "own F.batch_norm") for checkpoint in ("reentrant", "non-reentrant", "own", "fairscale")),
    ("reentrant", "function"),
    ("non-reentrant", "recomputed"),
]
# These repeat calls in different ways. The other checkpoints differ from them in when they do, and get fewer options.
FORMS = ("reentrant", "non-reentrant", "own", "fairscale")


@pytest.mark.parametrize(("checkpoint", "way"), REPEATED)
def test_recomputation_uses_the_original_call(pool, checkpoint, way):
    for ranks, splits in ((pool, (2, 0, 3)), (None, (4,))):
        every = list(cases(way, splits, checkpoint=checkpoint))
        check(ranks, *every[:: 1 if checkpoint in FORMS else 4])


def test_higher_derivatives_work_with_recomputation(pool):
    ways = "checkpointed", "recomputed"
    check(pool, *(Case((2, 0, 3), (3, 4), torch.float64, way=way, order=3) for way in ways))


# Dtypes of input and parameters.
DTYPES = [(torch.float64, None), *((dtype, torch.float32) for dtype in (torch.float32, torch.float16, torch.bfloat16))]


def test_replicas_accept_all_dtypes_layouts_frozen_tensors_and_derivatives(single_threaded):
    replicas = partial(Case, (5,), way="replicas")
    options = (
        {"affine": False},
        {"track_running_stats": False},
        {"eps_mode": "clamp", "eps": 2.0},
        {"activation": "silu"},
    )
    frozen = ("input",), ("weight", "bias"), ("input", "weight")
    check(
        None,
        *(replicas(shape[1:], *dtypes, layout=layout) for shape, layout in SHAPES_IN_LAYOUTS for dtypes in DTYPES),
        *(replicas((3, 4), torch.float64, frozen=names) for names in frozen),
        Case((2,), (3,), torch.float64, way="replicas"),  # one value in each
        *(replicas((3, 4), torch.float64, options=given, residual="activation" in given, order=3) for given in options),
    )


def batches_of(case, rank):
    """Yields input, residual and mask of each step on one rank."""
    for step in range(case.steps):
        mask = case.mask(step)
        input, residual = (whole.split(case.splits)[rank] for whole in case.batch(step)[:2])
        yield input, residual if case.residual else None, mask if mask is None else mask.split(case.splits)[rank]


def statistics_of(case):
    """Returns mean and unbiased variance of all unmasked values of all steps and ranks."""
    values = []
    for rank in range(len(case.splits)):
        for input, _, mask in batches_of(case, rank):
            values.append(values_of(input, None if mask is None else positions_of(mask, input)))
    return torch.cat(values).mean(0), torch.cat(values).var(0)


def recalibrate(cases):
    """Recalibrates each case after a training step; returns the statistics."""
    rank, results = dist.get_rank() if dist.is_initialized() else 0, []
    for case in cases:
        layer, outputs = case.layer(), []
        call, batches = call_of(case, layer), list(batches_of(case, rank))
        call(*batches[0])
        before = copy.deepcopy(layer.state_dict())
        refusal = pytest.raises(RuntimeError, match="statistics are not finite in the model itself")
        with refusal if case.spoiled else warnings.catch_warnings():
            recalibrate_statistics(layer, batches, forward=lambda batch, call=call: outputs.append(call(*batch)))  # noqa: B023
        assert layer.num_batches_tracked == before["num_batches_tracked"]
        alone = [step["output"] for step in run_rank(case, LOCAL, rank)["steps"]]
        torch.testing.assert_close(outputs, alone, equal_nan=True, msg=lambda text, case=case: f"{case}: {text}")
        if case.spoiled or "statistics" in case.frozen:
            torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
        results.append((layer.running_mean, layer.running_var))
    return results


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("function", "replicas", "compiled")])
def test_recalibration_works_with_every_option(pool, way):
    given = list(cases(way, (2, 0, 3), evaluates=False))
    for case, *ranks in zip(given, *pool.run(recalibrate, 3, given), strict=True):
        for statistics in ranks:
            if not (case.spoiled or "statistics" in case.frozen):
                torch.testing.assert_close(statistics, statistics_of(case), msg=lambda text, c=case: f"{c}: {text}")


def test_recalibration_counts_replicas_once(single_threaded):
    for case in cases("replicas", (4,), evaluates=False):
        ((mean, var),) = recalibrate([case])
        if not (case.spoiled or "statistics" in case.frozen):
            torch.testing.assert_close((mean, var), statistics_of(case))
