"""Files of whole models: the names that they contain, and files of earlier versions."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm, SyncBatchNorm2d, data_parallel, vacancy
from bagua_syncbn._names import origin_of
from bagua_syncbn.communicators import RankGroup
from tests.helpers.steps import draw, step
from tests.helpers.user_layers import BatchNormReLU

DATA = Path(__file__).parents[1] / "data"
LAYER = "sync_batchnorm.SyncBatchNorm2d"
NEW, RECOMPUTING, FUSED = "files.new_layer", "files.make_recomputing", "files.FusedActivation"


class SetsItself(nn.BatchNorm2d):
    def __setstate__(self, state):
        vars(self).update(state)


class InATuple(nn.BatchNorm2d):
    def __getstate__(self):
        return (vars(self),)

    def __setstate__(self, state):
        super().__setstate__(*state)


def converted(*layers, group=None):
    return bagua_syncbn.convert_sync_batchnorm(nn.Sequential(*layers), group)


def frozen():
    return bagua_syncbn.freeze_statistics(converted(nn.BatchNorm2d(3)))


def fused():
    return bagua_syncbn.fuse_activations(converted(nn.BatchNorm2d(3), nn.LeakyReLU(0.5)))


# Each kind of model, and the names of this package in its files.
KINDS = {
    "built": (lambda: SyncBatchNorm2d(3, activation="relu"), {LAYER}),
    "converted": (lambda: converted(nn.BatchNorm2d(3)), {LAYER}),
    "derived": (lambda: converted(BatchNormReLU(3)), {NEW}),
    "with its own way to set a state": (lambda: converted(SetsItself(3), group=2), {NEW}),
    "with a state that is no dict": (lambda: converted(InATuple(3), group=2), {NEW, "files.LayerState"}),
    "torch": (lambda: converted(nn.SyncBatchNorm(3)), {NEW, "sync_batchnorm.SyncBatchNorm"}),
    "frozen": (frozen, {LAYER}),
    "fused": (fused, {LAYER, FUSED}),
    "recomputed": (lambda: bagua_syncbn.recompute_outputs(fused()), {LAYER, FUSED, RECOMPUTING}),
    "recomputed layer": (lambda: bagua_syncbn.recompute_outputs(SyncBatchNorm2d(3)), {LAYER, RECOMPUTING}),
    "reverted": (lambda: bagua_syncbn.revert_sync_batchnorm(SyncBatchNorm(3)), {"sync_batchnorm.BatchNorm"}),
    "replicas": (
        lambda: data_parallel.DataParallelWithCallback(frozen()), {LAYER, "data_parallel.DataParallelWithCallback"}
    ),
    "vacancy": (lambda: vacancy.SynchronizedBatchNorm2d(3), {"vacancy.SynchronizedBatchNorm2d"}),
}  # fmt: skip


def through_checked_file(model, expected):
    """Returns ``model`` loaded from a file, by ``weights_only`` if its classes can be imported; checks the names."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    names = get_unsafe_globals_in_checkpoint(file)
    assert {name.removeprefix("bagua_syncbn.") for name in names if name.startswith("bagua_syncbn")} == expected
    file.seek(0)
    with safe_globals([*map(type, model.modules()), nn.LeakyReLU, Alone]):
        return torch.load(file, weights_only=not expected & {NEW, RECOMPUTING})


@pytest.mark.parametrize("kind", KINDS)
def test_files_contain_public_names_and_plain_data(kind):
    make, expected = KINDS[kind]
    model = make()
    for twin in (through_checked_file(model, expected), copy.deepcopy(model)):
        assert repr(twin) == repr(model)
        assert [type(part) for part in twin.modules()] == [type(part) for part in model.modules()]


class Alone:
    """A user's communicator."""

    size, rank = 1, 0

    def all_gather(self, tensor):
        return tensor[None]

    def all_reduce(self, tensor):
        return tensor


@pytest.mark.ranks(2)
def test_files_contain_groups_as_plain_data():
    groups = dist.new_group([0, 1]), dist.group.WORLD, init_device_mesh("cpu", (2,)), dist.new_group([0])
    for group in (*groups, 2, "node", [[0], [1]], RankGroup((0, 1)), Alone()):
        through_checked_file(converted(nn.BatchNorm2d(3), group=group), {LAYER})
    former = converted(nn.SyncBatchNorm(3, process_group=groups[0]))
    through_checked_file(former, {NEW, "sync_batchnorm.SyncBatchNorm"})


def saved():
    """Returns a model with each kind of layer of torch and this package."""
    torch.manual_seed(0)
    layers = nn.BatchNorm2d(3), nn.ReLU(), nn.SyncBatchNorm(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    model = bagua_syncbn.fuse_activations(converted(*layers, group=RankGroup((0, 1))))
    bagua_syncbn.freeze_statistics(model[3])
    model[4].process_group = [[0, 1], [2]]
    return bagua_syncbn.recompute_outputs(model)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.pt")), ids=lambda path: path.stem)
def test_files_of_earlier_versions_train(path):
    loaded, expected = torch.load(path, weights_only=False), saved()
    assert repr(loaded) == repr(expected)
    assert len({id(origin_of(loaded[index]).model) for index in (0, 2, 3, 4)}) == 1
    input = draw(4, 3, 5, 5, dtype=torch.float32)
    torch.testing.assert_close(step(loaded, input), step(expected, input))


def test_two_models_in_a_file_stay_two():
    first, second = converted(*map(nn.BatchNorm2d, (3, 3))), converted(*map(nn.BatchNorm2d, (3, 3)))
    for twins in (copy.deepcopy([first, second]), pickle.loads(pickle.dumps([first, second]))):
        models = [{id(origin_of(layer).model) for layer in twin} for twin in twins]
        assert [len(model) for model in models] == [1, 1]
        assert models[0] != models[1]
