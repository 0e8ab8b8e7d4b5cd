"""Runs one float64 training step of a module on the ranks and in one process, and compares the two."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf, isfinite
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional, over_ranks
from ..conversion import convert_sync_batchnorm
from ..errors import notify_peers
from ..groups import LOCAL, spec_of
from ..sync_batchnorm import SyncBatchNorm
from .ranks import Peers, in_float64, share_of, tensors_in

Loss = Callable[[Any, Any], Tensor]
Pairs = dict[str, tuple[Tensor, Tensor]]

# Tolerances in float64, relative to a tensor and, because terms may cancel, to the largest tensor of its kind.
_RELATIVE, _OF_LARGEST = 1e-7, 1e-12


class Step(NamedTuple):
    """Results of one step."""

    tensors: dict[str, Tensor]
    """Named by kind (output, loss, input-gradient, gradient or buffer) and by index or name."""
    unused: list[str]
    """Parameters without a gradient; ``tensors`` has zeros for them."""
    called: set[str]
    """Synchronized layers that were called."""


class Comparison:
    """Compares a step on the ranks, each with its own batch, with a step in one process on the merged batch.

    Args:
        ranks: the ranks, which all create the comparison.
        copy: returns a float64 copy of the module, equal on all ranks.
        batch: the batch of this rank.
        loss: called with a copy and a batch.
        merge: makes one batch of a list of batches.
        name: appended to the names of steps in errors.
        weight: factor of this rank's loss.
    """

    def __init__(
        self,
        ranks: Peers,
        copy: Callable[[], nn.Module],
        batch: Any,
        loss: Loss,
        merge: Callable[[list[Any]], Any],
        name: str = "",
        weight: float = 1.0,
    ) -> None:
        self.ranks, self.copy, self.batch, self.loss, self._name = ranks, copy, batch, loss, name
        batches = ranks.gather(f"the batch{name}", lambda: batch)
        self.whole = ranks.run(f"the merge of batches{name}", lambda: _merged(merge, batches, batch))
        self.expected, self.actual = self.step_alone(), self.step(weight)
        self.pairs = self._pairs(self.actual)
        self.difference = first_difference(ranks, self.pairs)

    def step_alone(self) -> Step:
        """Runs the step in one process."""
        step = lambda: run_alone(self.copy(), self.whole, self.loss)  # noqa: E731
        return self.ranks.run(f"the step in one process{self._name}", step)

    def step(self, weight: float) -> Step:
        """Runs the step on the ranks, with the loss multiplied by ``weight``."""
        step = lambda: _run(self.copy(), in_float64(self.batch, self.batch), self.loss, weight)  # noqa: E731
        return self.ranks.run(f"the step on ranks{self._name}", step)

    def is_equal(self, weight: float) -> bool:
        """Returns True if the step on the ranks equals one process when the loss is multiplied by ``weight``."""
        return first_difference(self.ranks, self._pairs(self.step(weight))) is None

    def _pairs(self, actual: Step) -> Pairs:
        """Pairs the tensors of ``actual`` with those of the step in one process.

        Losses and gradients are averaged over ranks. Outputs and input gradients are compared with this rank's part, or
        skipped if they cannot be split.
        """
        ranks, pairs = self.ranks, {}
        shapes = ranks.gather("the results", lambda: {name: list(own.shape) for name, own in actual.tensors.items()})
        for name in [name for name in self.expected.tensors if all(name in of_rank for of_rank in shapes)]:
            own, expected, kind = actual.tensors[name], self.expected.tensors[name], kind_of(name)
            share: Tensor | None = expected
            if kind in ("output", "input-gradient"):
                share = share_of(expected, [of_rank[name] for of_rank in shapes], ranks.rank)
            if kind == "input-gradient":
                own = own / ranks.size
            elif kind in ("loss", "gradient"):
                own = ranks.mean(own)
            if share is not None:
                pairs[name] = own, share
        return pairs


def first_difference(ranks: Peers, pairs: Pairs) -> str | None:
    """Describes the first pair that differs on any rank, where it differs most; None if all pairs are equal."""
    found = ranks.gather("the comparison", lambda: _first_difference(pairs, ranks.rank))
    return min(found)[2] or None


def _first_difference(pairs: Pairs, rank: int) -> tuple[float, float, str]:
    """Returns index, negative size and description of the first pair that differs on this rank."""
    largest: dict[str, float] = {}
    for name, (_, expected) in pairs.items():
        largest[kind_of(name)] = max(largest.get(kind_of(name), 0.0), _largest(expected))
    for index, (name, (actual, expected)) in enumerate(pairs.items()):
        if actual.shape != expected.shape:
            return index, -inf, f"{name} has size {list(actual.shape)} on rank {rank}, not {list(expected.shape)}"
        dtype = torch.promote_types(expected.dtype, torch.float64)
        actual, expected = actual.detach().to(dtype), expected.detach().to(dtype)
        own, size = _largest(expected), _largest(actual - expected)
        allowed = _RELATIVE * own + _OF_LARGEST * largest[kind_of(name)]
        if not torch.isclose(actual, expected, 0, allowed if isfinite(allowed) else 0, equal_nan=True).all():
            return index, -size, f"{name} differs by up to {size:.1e} on rank {rank}, of values up to {own:.1e}"
    return inf, 0.0, ""


def kind_of(name: str) -> str:
    """Returns the kind of a tensor of a :class:`Step`, given its name or the description of a difference."""
    return name.split()[0]


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _merged(merge: Callable[[list[Any]], Any], batches: list[Any], batch: Any) -> Any:
    whole = in_float64(merge(batches), batch)
    if tensors_in(batch) and not tensors_in(whole):
        raise TypeError(f"merge: expected a function that returns one batch, got {type(whole).__name__} from it")
    return whole


def _run(module: nn.Module, batch: Any, loss: Loss, weight: float = 1.0) -> Step:
    """Runs a step of ``module``."""
    outputs: list[Tensor] = []
    called: set[str] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            layer.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    module.register_forward_hook(lambda _, args, output: outputs.extend(tensors_in(output)))
    with torch.enable_grad(), notifying_peers(module):
        value = loss_of(module, batch, loss) * weight
        value.backward()
    found = {f"output {index}" if len(outputs) > 1 else "output": output for index, output in enumerate(outputs)}
    found["loss"] = value.detach() if weight else torch.zeros_like(value)  # an empty batch may have a loss of NaN
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    inputs = [tensor for tensor in tensors_in(batch) if tensor.requires_grad]
    found |= {f"input-gradient {index}": _gradient(tensor) for index, tensor in enumerate(inputs)}
    found |= {f"gradient {name}": _gradient(parameter) for name, parameter in trained.items()}
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return Step(found, [name for name, parameter in trained.items() if parameter.grad is None], called)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.to_dense()


def run_alone(module: nn.Module, batch: Any, loss: Loss) -> Step:
    """Runs a step of ``module`` in which layers and functions do not synchronize."""
    for layer in list(module.modules()):
        if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            convert_sync_batchnorm(layer, LOCAL)
    with local_functions(functional, over_ranks):
        return _run(module, batch, loss)


@contextmanager
def local_functions(*modules: ModuleType) -> Iterator[None]:
    """Context in which the functions of ``modules`` do not synchronize, whatever group they are called with."""
    local = spec_of(LOCAL)
    with ExitStack() as restored:
        for names in map(vars, modules):
            restored.callback(names.update, spec_of=names["spec_of"])
            names["spec_of"] = lambda _: local  # in all threads, because replicas call functions too
        yield


def loss_of(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """Returns ``loss(model, batch)``; raises TypeError if it is not a scalar tensor."""
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"size {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss: expected a function that returns a scalar tensor, got {got} from it")
    return value


@contextmanager
def notifying_peers(model: nn.Module) -> Iterator[None]:
    """Context whose errors are also raised on ranks that wait for this one in a layer of ``model``."""
    try:
        yield
    except Exception as error:
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                notify_peers(layer._sync_state.group, layer, error)
        raise


def copied(model: nn.Module) -> nn.Module:
    """Returns a copy of ``model`` in float64."""
    try:
        return copy.deepcopy(model).double()
    except Exception as error:
        raise RuntimeError(
            f"model: copy.deepcopy failed, {type(error).__name__}: {error}; by_layer=True copies one layer at a time"
        ) from error


def copied_layer(layer: nn.Module) -> nn.Module:
    """Returns a copy of ``layer`` in float64 without hooks, also if ``fully_shard`` forbids ``copy.deepcopy``."""
    own = object.__new__(type(layer))
    nn.Module.__init__(own)
    vars(own).update((name, value) for name, value in vars(layer).items() if name not in vars(own))
    if isinstance(layer, SyncBatchNorm):
        vars(own)["_sync_state"] = replace(layer._sync_state, caches={})
    own.training = layer.training
    for tensors in ("_parameters", "_buffers"):
        vars(own)[tensors] = in_float64(vars(layer)[tensors], vars(layer)[tensors])
    vars(own)["_modules"] = {name: child and copied_layer(child) for name, child in layer._modules.items()}
    return own


def with_values(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Copies ``values`` to the parameters and buffers with these names; returns ``module``."""
    tensors = tensors_of(module)
    for name, value in values.items():
        tensors[name].detach().copy_(value)
    return module


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
