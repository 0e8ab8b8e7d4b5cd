"""freeze_statistics makes layers normalize with running statistics in training, without messages."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import update_bn

from bagua_syncbn import (
    SyncBatchNorm2d,
    conversion_report,
    convert_sync_batchnorm,
    freeze_statistics,
    revert_sync_batchnorm,
    unfreeze_statistics,
)
from tests.helpers.observed import MESSAGE, collectives
from tests.helpers.steps import assert_same_bits, check_ranks, draw, unchanged
from tests.helpers.user_layers import BatchNormAct, Doubled


@pytest.mark.ranks(3)
def test_only_frozen_layers_stop_synchronizing():
    """Trains before, while and after the first layer is frozen, and compares with one process."""
    split = 1, 4, 0
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)).double()
    nn.init.uniform_(plain[0].weight)
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    messages = []
    for action in (nn.Module.train, freeze_statistics, unfreeze_statistics):
        action(model[0])
        model.train()
        plain[0].train(action is not freeze_statistics)
        for seed in range(3):
            with collectives() as seen:
                check_ranks(model, plain, *draw(2, sum(split), 3, 4, seed=seed), split)
        messages.append(seen[MESSAGE])  # the last step sends no probe
    assert messages == [4, 2, 4]


def converted(layer):
    return convert_sync_batchnorm(nn.Sequential(layer))[0]


class CustomTrain(nn.BatchNorm2d):
    def train(self, mode=True):
        self.training = mode
        return self


KINDS = {
    "converted": lambda: converted(nn.BatchNorm2d(3)),
    "synchronized": lambda: SyncBatchNorm2d(3, activation="relu"),
    "a converted subclass": lambda: converted(BatchNormAct(3)),
    "with a custom train": lambda: converted(CustomTrain(3)),
    "parametrized": lambda: converted(parametrized(nn.BatchNorm2d(3))),
}


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def trained(layer):
    layer(torch.randn(4, 3, 2, 2) * 3 + 1)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_stays_frozen_until_it_is_unfrozen(kind):
    layer, input = trained(KINDS[kind]()), torch.randn(4, 3, 2, 2)
    expected, state, model = copy.deepcopy(layer).eval()(input), copy.deepcopy(layer.state_dict()), nn.Sequential(layer)
    assert freeze_statistics(model) is model
    copies = [copy.deepcopy(model)] + ([pickle.loads(pickle.dumps(model))] if kind != "parametrized" else [])
    for own in (*copies, model):
        assert "statistics frozen" in str(own)
        for change in (nn.Module.eval, nn.Module.train, lambda own: setattr(own[0], "training", True)):
            change(own)
            assert not own[0].training
            torch.testing.assert_close(own(input), expected)
        own.load_state_dict(own.state_dict())
        convert_sync_batchnorm(own)
        assert "synchronized already; statistics frozen" in str(conversion_report(own))
        torch.testing.assert_close(own(input), expected)
        assert_same_bits(own[0].state_dict(), state)
        assert unfreeze_statistics(own).train()[0].training
        assert "frozen" not in str(own) + str(conversion_report(own))


def test_an_unfrozen_layer_gets_the_mode_of_its_parent():
    model = nn.Sequential(SyncBatchNorm2d(3), nn.Sequential(SyncBatchNorm2d(3)))
    freeze_statistics(model)
    for module in model.modules():  # like trainers that restore modes after validation
        module.training = bool(module.training)
    model[1].eval()
    unfreeze_statistics(model)
    assert [model[0].training, model[1][0].training] == [True, False]
    layer = freeze_statistics(SyncBatchNorm2d(3).eval())
    assert not unfreeze_statistics(layer).training
    layer = freeze_statistics(freeze_statistics(layer).train())
    assert unfreeze_statistics(layer).training


def test_filters_select_the_layers_to_freeze():
    model = nn.ModuleDict({name: SyncBatchNorm2d(3) for name in "abc"})
    model["again"] = model["a"]
    freeze_statistics(model, lambda name, layer: name != "a")
    assert str(model).count("frozen") == 4
    unfreeze_statistics(model, lambda name, layer: name == "b")
    assert ["frozen" in str(model[name]) for name in ("a", "b", "c")] == [True, False, True]
    with pytest.warns(UserWarning, match="found no layer to freeze in Conv2d") as caught:
        freeze_statistics(nn.Conv2d(1, 1, 1))
    assert caught[0].filename == __file__


REFUSED = {
    "torch's": (lambda: nn.BatchNorm2d(3), "BatchNorm2d '1' is not synchronized; convert"),
    "untracked": (lambda: SyncBatchNorm2d(3, track_running_stats=False), "'1' has no running statistics; exclude"),
    "lazy": (lambda: converted(nn.LazyBatchNorm2d()), "SyncLazyBatchNorm2d '1' is lazy and uninitialized; call"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_freezing_an_unsupported_layer_raises(kind):
    make, told = REFUSED[kind]
    model = nn.Sequential(SyncBatchNorm2d(3), make())
    with pytest.raises((TypeError, ValueError), match=told):
        freeze_statistics(model)
    assert model[0].training
    freeze_statistics(model, lambda name, layer: name == "0")
    assert not model.train()[0].training


def test_calls_that_conflict_with_freezing_raise():
    model = freeze_statistics(nn.Sequential(trained(SyncBatchNorm2d(3))))
    batches = [torch.randn(4, 3, 2, 2)]
    with unchanged(model), pytest.raises(RuntimeError, match="SyncBatchNorm2d is frozen"):
        update_bn(batches, model)
    with pytest.raises(ValueError, match="frozen SyncBatchNorm2d; call unfreeze_statistics first"):
        revert_sync_batchnorm(model)
