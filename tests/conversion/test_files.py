"""Files of whole models: the names that they contain, and files of earlier versions."""

import copy
import io
import pickle
import pickletools
from pathlib import Path

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm, SyncBatchNorm2d
from bagua_syncbn._names import origin_of
from bagua_syncbn.communicators import RankGroup

DATA = Path(__file__).parents[1] / "data"
CLASSES = {f"bagua_syncbn.sync_batchnorm SyncBatchNorm{end}" for end in ("", "1d", "2d", "3d")}


class Doubled(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


class Alone:
    """A user's communicator."""

    size, rank = 1, 0

    def all_gather(self, tensor):
        return tensor[None]

    def all_reduce(self, tensor):
        return tensor


def converted(*layers, group=None):
    return bagua_syncbn.convert_sync_batchnorm(nn.Sequential(*layers), group)


MODELS = {
    "built": lambda: nn.Sequential(SyncBatchNorm(3), SyncBatchNorm2d(3, activation=("elu", 0.5))),
    "converted": lambda: converted(nn.BatchNorm2d(3), nn.BatchNorm2d(3)),
    "derived": lambda: converted(Doubled(3)),
    "torch": lambda: converted(nn.SyncBatchNorm(3)),
    "frozen": lambda: bagua_syncbn.freeze_statistics(converted(nn.BatchNorm2d(3))),
    "fused": lambda: bagua_syncbn.fuse_activations(converted(nn.BatchNorm2d(3), nn.ReLU())),
    "recomputed": lambda: bagua_syncbn.recompute_outputs(converted(nn.BatchNorm2d(3), nn.ReLU())),
    "recomputed layer": lambda: bagua_syncbn.recompute_outputs(converted(Doubled(3))[0]),
    "number": lambda: converted(nn.BatchNorm2d(3), group=2),
    "node": lambda: converted(nn.BatchNorm2d(3), group="node"),
    "lists": lambda: converted(nn.BatchNorm2d(3), group=[[0, 1], [2]]),
    "ranks": lambda: converted(nn.BatchNorm2d(3), group=RankGroup((0, 1))),
    "communicator": lambda: converted(nn.BatchNorm2d(3), group=Alone()),
}


def names_in(data):
    """Returns the global names that the pickle ``data`` contains."""
    names, strings = set(), []
    for op, argument, _ in pickletools.genops(data):
        if op.name == "GLOBAL":
            names.add(argument)
        elif op.name == "STACK_GLOBAL":
            names.add(" ".join(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
    return names


@pytest.mark.parametrize("kind", MODELS)
def test_files_name_no_private_module(kind):
    # Protocol 2, the default of torch.save, contains every name in one opcode.
    names = {name for name in names_in(pickle.dumps(MODELS[kind](), 2)) if name.startswith("bagua_syncbn")}
    allowed = CLASSES | {f"bagua_syncbn.files {name}" for name in bagua_syncbn.files._NAMES}
    assert names
    assert names <= allowed


def saved():
    """Returns a model with each kind of layer of torch and this package."""
    torch.manual_seed(0)
    layers = nn.BatchNorm2d(3), nn.ReLU(), nn.SyncBatchNorm(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    model = bagua_syncbn.fuse_activations(converted(*layers, group=RankGroup((0, 1))))
    bagua_syncbn.freeze_statistics(model[3])
    model[4].process_group = [[0, 1], [2]]
    return bagua_syncbn.recompute_outputs(model)


def step(model):
    torch.manual_seed(1)
    input, grad_output = torch.randn(2, 4, 3, 5, 5)
    output = model(input.requires_grad_())
    output.backward(grad_output)
    return output, input.grad, *(tensor.grad for tensor in model.parameters()), *model.buffers()


@pytest.mark.parametrize("path", sorted(DATA.glob("*.pt")), ids=lambda path: path.stem)
def test_files_of_earlier_versions_train(path):
    loaded, expected = torch.load(path, weights_only=False), saved()
    assert repr(loaded) == repr(expected)
    assert len({id(origin_of(loaded[index]).model) for index in (0, 2, 3, 4)}) == 1
    torch.testing.assert_close(step(loaded), step(expected))


def test_two_models_in_a_file_stay_two():
    first, second = MODELS["converted"](), MODELS["converted"]()
    for twins in (copy.deepcopy([first, second]), pickle.loads(pickle.dumps([first, second]))):
        models = [{id(origin_of(layer).model) for layer in twin} for twin in twins]
        assert [len(model) for model in models] == [1, 1]
        assert models[0] != models[1]


def test_weights_only_opens_state_dicts_and_allowed_models():
    model, file = MODELS["fused"](), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    files = bagua_syncbn.files
    ours = [SyncBatchNorm2d, files.Activation, files.ConvertedModel, files.FusedActivation]
    ours += [files.LayerState, files.Origin, files.spec_of]
    with torch.serialization.safe_globals([nn.Sequential, nn.ReLU, *ours]):
        assert repr(torch.load(file, weights_only=True)) == repr(model)
