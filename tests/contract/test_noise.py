"""Batch noise: predictions for many random batches, ranks against one process, and an unchanged model."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn import convert_sync_batchnorm, measure_batch_noise

POSITIONS, EPS = 20, 1e-5


def correlated(samples, rho, seed):
    """Returns values (samples, 3, 20) of mean 5, deviation 2 and intraclass correlation ``rho``."""
    generator = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(samples, 3, width, dtype=torch.float64, generator=generator) for width in (1, POSITIONS))
    return 5 + 2 * (rho**0.5 * common + (1 - rho) ** 0.5 * own)


def layer():
    """A layer whose running statistics are those of ``correlated``."""
    own = nn.BatchNorm1d(3, EPS).double()
    own.running_mean.fill_(5)
    own.running_var.fill_(4)
    own.num_batches_tracked.fill_(1)
    return nn.Sequential(own)


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.6])
def test_the_prediction_holds_for_many_random_batches(rho):
    (found,) = measure_batch_noise(layer(), correlated(20_000, rho, 0).split(100)).layers
    assert found.positions == POSITIONS
    assert found.worth == pytest.approx(POSITIONS / (1 + (POSITIONS - 1) * rho), rel=0.03)
    assert found.spread == pytest.approx(1, abs=0.1)
    for samples in (16, 64):
        batches = correlated(200 * samples, rho, 1).unflatten(0, (200, samples))
        means = batches.mean((1, 3), keepdim=True)
        deviations = batches.var((1, 3), unbiased=False, keepdim=True).sqrt()
        assert means.var(0).sqrt().mean() / 2 == pytest.approx((found.worth * samples) ** -0.5, rel=0.1)
        errors = (batches - means) / deviations - (batches - 5) / 2
        assert errors.square().mean().sqrt() == pytest.approx(found.at(samples), rel=0.1)


# Batches with few distinct samples: worth, whether there is noise, spread of batch means, and whether it is mixed.
# Zeros are computed as differences, so rounding makes them slightly positive or negative.
EQUAL = {
    "all samples": (lambda x: [x[:1].expand(5, -1, -1)] * 4, torch.inf, False, None, False),
    "samples of a batch": (lambda x: [one.expand(5, -1, -1) for one in x.split(1)], None, True, torch.inf, True),
    "batches": (lambda x: [x.roll(places, 0) for places in range(5)], None, True, 0.0, False),
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("positions", [1, POSITIONS])
def test_equal_samples_and_batches_have_no_noise_between_them(name, positions):
    make, worth, is_noisy, spread, is_mixed = EQUAL[name]
    for seed in range(8):  # rounds to either side
        x = correlated(4, 0.1, seed)[:, :, :positions] + 1000
        noise = measure_batch_noise(layer(), make(x))
        (found,) = noise.layers
        order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
        (shuffled,) = measure_batch_noise(layer(), [torch.cat(make(x))[order]]).layers
        assert found.of_one_sample == pytest.approx(shuffled.of_one_sample)
        assert (found.of_one_sample > 0) == is_noisy
        assert found.worth == pytest.approx(shuffled.worth if worth is None else worth)
        assert (found.spread, found.is_mixed) == (spread, is_mixed)
        assert ("synchronize; above 5% in 1 of 1" in noise.verdict) == is_noisy
        assert ("batch means spread inf times" in str(noise)) == is_mixed


def model(**options):
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 5), nn.BatchNorm1d(5)).double()
    own(torch.randn(64, 6, dtype=torch.float64))
    return convert_sync_batchnorm(own, **options)


def batches(rank, size):
    x = torch.randn(60, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    return [] if rank == 2 else [*x.split(5)][rank :: min(size, 2)]


def state_of(own):
    return [[module.training for module in own.modules()], torch.get_rng_state().tolist(), random.getstate()]


def numbers(noise):
    return [(own.name, own.positions, own.worth, own.of_one_sample, own.spread) for own in noise.layers]


@pytest.mark.ranks(3)
def test_ranks_measure_what_one_process_does_and_leave_the_model_as_it_was():
    frozen = bagua_syncbn.freeze_statistics(
        model(filter=lambda name, _: name == "1"), filter=lambda name, _: name == "1"
    )
    for own, names in ((model(), "14"), (model(filter=lambda *_: False), "14"), (frozen, "4")):
        before, seen = copy.deepcopy(own.state_dict()), state_of(own)
        noise = measure_batch_noise(own, batches(dist.get_rank(), 3))
        alone = measure_batch_noise(own, batches(0, 1), process_group=1)
        for (*name, worth, of_one, spread), expected in zip(numbers(noise), numbers(alone), strict=True):
            assert [*name, pytest.approx(worth), pytest.approx(of_one), pytest.approx(spread)] == list(expected)
        assert "".join(name for name, *_ in numbers(noise)) == names
        assert (noise.ranks, noise.samples, alone.ranks) == (3, 5, 1)
        assert state_of(own) == seen
        torch.testing.assert_close(own.state_dict(), before, rtol=0, atol=0)
        assert not any(module._forward_pre_hooks for module in own.modules())
        bagua_syncbn.unfreeze_statistics(own)
        assert own[1].training


def test_the_verdict_is_about_the_size_and_the_order_of_batches():
    x = correlated(400, 0.6, 0)
    noise = measure_batch_noise(layer(), x.split(4))
    few, many = noise.at(2), noise.at(2000)
    assert few.verdict.endswith("of the standard deviation in '0': synchronize; above 5% in 1 of 1 layers")
    assert "no need to synchronize; above 5% in 0 of 1" in many.verdict
    assert noise.samples == 4
    assert f"{noise.layers[0].at(8):.0%}" in str(few)
    assert "#" * 30 in str(few)
    assert "spread" not in noise.verdict
    ordered = x[x.mean((1, 2)).argsort()]
    mixed = measure_batch_noise(layer(), ordered.split(4))
    assert "batch means spread" in mixed.verdict
    assert mixed.layers[0].spread > 1.5
    assert mixed.layers[0].of_one_sample == pytest.approx(noise.layers[0].of_one_sample)


def test_calls_are_told_apart_and_dead_channels_have_no_noise():
    own = layer()
    x = correlated(50, 0.1, 0)
    x[:, 2] = 5
    noise = measure_batch_noise(own, x.split(6), forward=lambda batch: own(own(batch)))
    first, second = noise.layers
    assert noise.samples == 6  # the last batch has 2
    assert (first.name, second.name) == ("0", "0, call 2")
    assert 0 < first.of_one_sample < 1
    assert first.of_one_sample == pytest.approx(second.of_one_sample, rel=1e-3)


def test_wrong_arguments_are_named():
    x = [torch.randn(4, 3, 2, dtype=torch.float64)]
    for error, match, arguments in (
        (TypeError, "module: expected a torch.nn.Module, got int", (3, x)),
        (TypeError, "batches: expected an iterable of batches, got Tensor", (layer(), x[0])),
        (TypeError, "batches: expected tensors, or lists", (layer(), ["a"])),
        (ValueError, "batches: expected a non-empty batch on some rank", (layer(), [])),
        (ValueError, "batches: expected a non-empty batch on some rank", (layer(), [x[0][:0]])),
        (ValueError, "batches: expected at least two samples, got 1 in '0'", (layer(), [x[0][:1]])),
        (ValueError, "module: expected batch normalization layers in training mode", (layer().eval(), x)),
    ):
        with pytest.raises(error, match=match):
            measure_batch_noise(*arguments)
    for name, value in {"samples": 0, "limit": 0.0}.items():
        with pytest.raises(ValueError, match=f"{name}: expected a positive number"):
            measure_batch_noise(layer(), x, **{name: value})
    masked = convert_sync_batchnorm(layer())
    with (
        bagua_syncbn.masked(masked, torch.ones(4, 1, 2, dtype=torch.bool)),
        pytest.raises(ValueError, match="module: expected layers without masks"),
    ):
        measure_batch_noise(masked, x)
    with pytest.warns(UserWarning, match="these layers were never trained"):
        measure_batch_noise(nn.Sequential(nn.BatchNorm1d(3)).double(), x)
