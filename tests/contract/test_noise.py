"""Batch noise: predictions hold for random batches, ranks equal one process, and the model is unchanged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn import convert_sync_batchnorm, measure_batch_noise
from tests.helpers.steps import draw, unchanged

POSITIONS = 20


def correlated(samples, rho, seed=0):
    """Returns values (samples, 3, 20) with mean 5, deviation 2 and intraclass correlation ``rho``."""
    common, own = draw(samples, 3, 1, seed=seed), draw(samples, 3, POSITIONS, seed=seed + 100)
    return 5 + 2 * (rho**0.5 * common + (1 - rho) ** 0.5 * own)


def layer(eps=1e-5):
    norm = nn.BatchNorm1d(3, eps).double()
    norm.num_batches_tracked.fill_(1)
    return nn.Sequential(norm)


@pytest.mark.parametrize(("rho", "eps"), [(0.0, 1e-5), (0.1, 1e-5), (0.6, 1e-5), (0.1, 0.5)])
def test_the_prediction_holds_for_random_batches(rho, eps):
    noise = measure_batch_noise(layer(eps), correlated(20_000, rho).split(100))
    (found,) = noise.layers
    assert found.positions == POSITIONS
    assert found.worth == pytest.approx(POSITIONS / (1 + (POSITIONS - 1) * rho), rel=0.03)
    for samples in (16, 64):
        batches = correlated(200 * samples, rho, 1).unflatten(0, (200, samples))
        means = batches.mean((1, 3), keepdim=True)
        deviations = (batches.var((1, 3), unbiased=False, keepdim=True) + eps).sqrt()
        errors = (batches - means) / deviations - (batches - 5) / (4 + eps) ** 0.5
        assert errors.square().mean().sqrt() == pytest.approx(found.at(samples), rel=0.05)
    assert noise.samples == 100
    assert noise.at(2).verdict.endswith("of the standard deviation in '0': synchronize; above 5% in 1 of 1 layers")
    assert "no need to synchronize; above 5% in 0 of 1" in noise.at(2000).verdict
    assert f"{found.at(8):.0%}" in str(noise)


@pytest.mark.parametrize("positions", [1, POSITIONS])
def test_equal_samples_and_constant_channels_have_no_noise(positions):
    for seed in range(8):
        x = correlated(1, 0.1, seed)[0, :, :positions] + 1000
        x[2] = 5
        batch = torch.stack([x[:, torch.randperm(positions)] for _ in range(20)])  # means are equal up to rounding
        (found,) = measure_batch_noise(layer(), batch.split(5)).layers
        assert (found.of_one_sample, found.worth) == (0, torch.inf)


def test_repeated_calls_of_a_layer_count_as_more_samples():
    own, x = layer(), correlated(50, 0.1)
    forwards = own, lambda batch: [own(part) for part in batch.split(20)]
    (once,), (repeated,) = (measure_batch_noise(own, [x], forward=forward).layers for forward in forwards)
    assert vars(once) == pytest.approx(vars(repeated))


def test_buffers_of_scripted_modules_are_restored():
    own = nn.Sequential(layer(), torch.jit.script(nn.BatchNorm1d(3).double()))
    with unchanged(own):
        measure_batch_noise(own, [correlated(50, 0.1)])


def model(**options):
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 5), nn.BatchNorm1d(5)).double()
    own(draw(64, 6))
    return convert_sync_batchnorm(own, **options)


def batches(rank, size):
    return [] if rank == 2 else [*(draw(60, 6) * 3 + 1000).split(5)][rank :: min(size, 2)]


@pytest.mark.ranks(3)
def test_ranks_measure_the_noise_of_one_process_and_keep_the_model_unchanged():
    is_first = lambda name, _: name == "1"  # noqa: E731
    frozen = bagua_syncbn.freeze_statistics(model(filter=is_first), filter=is_first)
    for own, names in ((model(), "14"), (model(filter=lambda *_: False), "14"), (frozen, "4")):
        with unchanged(own):
            noise = measure_batch_noise(own, batches(dist.get_rank(), 3))
            alone = measure_batch_noise(own, batches(0, 1), process_group=1)
        assert [layer.name for layer in noise.layers] == [*names]
        for found, expected in zip(noise.layers, alone.layers, strict=True):
            assert vars(found) == pytest.approx(vars(expected))
        assert (noise.ranks, noise.samples, alone.ranks) == (3, 5, 1)


def test_invalid_arguments_raise():
    x = [torch.randn(4, 3, 2, dtype=torch.float64)]
    for error, match, options in (
        (TypeError, "module: expected a torch.nn.Module, got int", {"module": 3}),
        (ValueError, "batches: expected a non-empty batch on some rank", {"batches": [x[0][:0]]}),
        (ValueError, "batches: expected at least two samples, got 1 in '0'", {"batches": [x[0][:1]]}),
        (ValueError, "module: expected batch normalization layers in training mode", {"module": layer().eval()}),
        (ValueError, "samples: expected at least 1, got 0", {"samples": 0}),
        (TypeError, "samples: expected an int, got float", {"samples": 2.5}),
        (TypeError, "samples: expected an int, got bool", {"samples": True}),
        (ValueError, "limit: expected a finite number of at least 0, got -0.1", {"limit": -0.1}),
        (ValueError, "limit: expected a finite number of at least 0, got nan", {"limit": torch.nan}),
        (TypeError, "limit: expected a number, got str", {"limit": "5%"}),
        (TypeError, "device: expected a torch.device, its name or number, or None, got float", {"device": 0.5}),
        (TypeError, "process_group: expected None", {"process_group": "hosts"}),
    ):
        with pytest.raises(error, match=match):
            measure_batch_noise(**{"module": layer(), "batches": x} | options)
    noise = measure_batch_noise(layer(), x, limit=0)
    for measured in (noise, noise.layers[0]):
        with pytest.raises(ValueError, match="samples: expected at least 1"):
            measured.at(-3)
    masked = convert_sync_batchnorm(layer())
    with (
        bagua_syncbn.masked(masked, torch.ones(4, 1, 2, dtype=torch.bool)),
        pytest.raises(ValueError, match="module: expected layers without masks"),
    ):
        measure_batch_noise(masked, x)
    with pytest.warns(UserWarning, match="layers with untrained running statistics: 0") as caught:
        measure_batch_noise(nn.Sequential(nn.BatchNorm1d(3)).double(), x)
    assert caught[0].filename == __file__
