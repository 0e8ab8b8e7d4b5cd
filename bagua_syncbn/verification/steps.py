"""A step of a module in float64, on the ranks and in one process, and the differences between the two."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import isfinite
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import functional
from ..conversion import convert_sync_batchnorm
from ..errors import tell_peers
from ..extras import loss as loss_over_ranks
from ..groups import LOCAL, spec_of
from ..sync_batchnorm import SyncBatchNorm
from .ranks import Peers, in_float64, share_of, tensors_in

Loss = Callable[[Any, Any], Tensor]

# float64 rounds to 1e-16 of a value; where terms cancel, to 1e-16 of the largest tensors of the same kind.
_RELATIVE, _OF_LARGEST = 1e-7, 1e-12


class Step(NamedTuple):
    """Results of one step."""

    tensors: dict[str, Tensor]
    """Named by kind (output, loss, input-gradient, gradient or buffer), and by index or name."""
    unused: list[str]
    """Parameters without a gradient; their gradients are zeros."""
    called: set[str]
    """Synchronized layers that were called."""


class Comparison:
    """A step of a module on the ranks, each with its ``batch``, and in one process with all batches, merged.

    ``copy`` returns a copy of the module in float64, the same on all ranks. The loss of this rank is multiplied by
    ``weight``. Errors name the module ``name``.
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
        batches = ranks.together(f"the batch{name}", lambda: batch)
        self.whole = ranks.each(f"the merge of batches{name}", lambda: _merged(merge, batches, batch))
        self.expected, self.actual = self.step_alone(), self.step(weight)

    def step_alone(self) -> Step:
        """Makes the step in one process."""
        step = lambda: run_alone(self.copy(), self.whole, self.loss)  # noqa: E731
        return self.ranks.each(f"the step in one process{self._name}", step)

    def step(self, weight: float) -> Step:
        """Makes the step on the ranks, with a loss multiplied by ``weight``."""
        step = lambda: run(self.copy(), in_float64(self.batch, self.batch), self.loss, weight)  # noqa: E731
        return self.ranks.each(f"the step on ranks{self._name}", step)

    def pairs(self, actual: Step) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns tensors of ``actual`` and of the step in one process.

        Loss and gradients of the ranks are averaged. Outputs and gradients of inputs are compared with the part of this
        rank; those that cannot be split are left out.
        """
        ranks, pairs = self.ranks, {}
        shapes = ranks.together("the results", lambda: {name: list(own.shape) for name, own in actual.tensors.items()})
        for name in [name for name in self.expected.tensors if all(name in of_rank for of_rank in shapes)]:
            own, whole, kind = actual.tensors[name], self.expected.tensors[name], kind_of(name)
            share: Tensor | None = whole
            if kind in ("output", "input-gradient"):
                share = share_of(whole, [of_rank[name] for of_rank in shapes], ranks.rank)
            if kind == "input-gradient":
                own = own / ranks.size
            elif kind in ("loss", "gradient"):
                own = ranks.mean(own)
            if share is not None:
                pairs[name] = own, share
        return pairs

    def difference(self, actual: Step) -> str | None:
        """Returns :func:`first_difference` between ``actual`` and the step in one process."""
        return first_difference(self.ranks, self.pairs(actual))


def first_difference(ranks: Peers, pairs: dict[str, tuple[Tensor, Tensor]]) -> str | None:
    """Describes the first pair that differs on a rank by more than rounding; returns None if all are equal on all."""
    found = ranks.together("the comparison", lambda: _differences(pairs, ranks.rank))
    return min((own for of_rank in found for own in of_rank), default=(0, 0.0, None))[2]


def _differences(pairs: dict[str, tuple[Tensor, Tensor]], rank: int) -> list[tuple[int, float, str]]:
    """Returns position, negative size and description of each difference."""
    largest: dict[str, float] = {}
    for name, (_, expected) in pairs.items():
        largest[kind_of(name)] = max(largest.get(kind_of(name), 0.0), _largest(expected))
    found = []
    for position, (name, (actual, expected)) in enumerate(pairs.items()):
        dtype = torch.promote_types(expected.dtype, torch.float64)
        actual, expected = actual.detach().to(dtype), expected.detach().to(dtype)
        if actual.shape != expected.shape:
            text = f"{name} has size {list(actual.shape)} on rank {rank}, not {list(expected.shape)}"
            found.append((position, -torch.inf, text))
            continue
        own, size = _largest(expected), _largest(actual - expected)
        allowed = _RELATIVE * own + _OF_LARGEST * largest[kind_of(name)]
        if not torch.isclose(actual, expected, 0, allowed if isfinite(allowed) else 0, equal_nan=True).all():
            text = f"{name} differs by up to {size:.1e} on rank {rank}, of values up to {own:.1e}"
            found.append((position, -size, text))
    return found


def kind_of(name: str) -> str:
    """Returns the kind of a tensor of a :class:`Step`, given its name or the description of a difference."""
    return name.split()[0]


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _merged(merge: Callable[[list[Any]], Any], batches: list[Any], batch: Any) -> Any:
    whole = in_float64(merge(batches), batch)
    if tensors_in(batch) and not tensors_in(whole):
        raise TypeError(f"merge: expected a function of a list of batches that returns one, got {type(whole).__name__}")
    return whole


def run(module: nn.Module, batch: Any, loss: Loss, weight: float = 1.0) -> Step:
    """Makes a step of ``module``."""
    outputs: list[Tensor] = []
    called: set[str] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            layer.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    module.register_forward_hook(lambda _, args, output: outputs.extend(tensors_in(output)))
    with torch.enable_grad(), telling_peers(module):
        value = loss_of(module, batch, loss) * weight
        value.backward()
    found = {f"output {index}" if len(outputs) > 1 else "output": output for index, output in enumerate(outputs)}
    found["loss"] = value.detach() if weight else torch.zeros_like(value)  # the mean of nothing is NaN
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    inputs = [tensor for tensor in tensors_in(batch) if tensor.requires_grad]
    found |= {f"input-gradient {index}": _gradient(tensor) for index, tensor in enumerate(inputs)}
    found |= {f"gradient {name}": _gradient(parameter) for name, parameter in trained.items()}
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return Step(found, [name for name, parameter in trained.items() if parameter.grad is None], called)


def run_alone(module: nn.Module, batch: Any, loss: Loss) -> Step:
    """Makes a step of ``module`` whose layers, and calls of functions, synchronize with no other rank."""
    with functions_alone(functional, loss_over_ranks):
        return run(alone(module), batch, loss)


@contextmanager
def functions_alone(*modules: ModuleType) -> Iterator[None]:
    """Context in which calls of the functions of these ``modules`` synchronize with no other rank."""
    local = spec_of(LOCAL)
    with ExitStack() as restored:
        for names in map(vars, modules):
            restored.callback(names.update, spec_of=names["spec_of"])
            names["spec_of"] = lambda _: local  # whatever group a call gives; in all threads: replicas make calls too
        yield


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.to_dense()


def loss_of(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """Returns ``loss(model, batch)``; raises TypeError if it is no scalar tensor."""
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"size {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss: expected a function of the model and a batch that returns a scalar tensor, got {got}")
    return value


def try_out(copy: nn.Module, batch: Any, loss: Loss, model: nn.Module) -> None:
    """Calls ``loss`` once. Synchronized layers return their input and ``mean_over_ranks`` the mean of this rank.

    So no rank waits for one that raises.

    Raises:
        ValueError: ``loss`` calls no module, or calls a part of ``model`` and not of ``copy``.
    """
    own, called = set(model.modules()), set()
    expected = "loss: expected a function that calls its first argument, a copy of the model in float64, got one that"

    def note(part: nn.Module, _: Any) -> None:
        called.add(part)
        if part in own:
            raise ValueError(f"{expected} calls the model that was given to verify_synchronization")

    for part in copy.modules():
        if isinstance(part, (SyncBatchNorm, nn.SyncBatchNorm)):
            vars(part)["forward"] = lambda input, *_, **__: input
    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(note).remove)
        hooks.enter_context(functions_alone(loss_over_ranks))
        loss_of(copy, batch, loss)
    if not called:
        raise ValueError(f"{expected} does not")


@contextmanager
def telling_peers(model: nn.Module) -> Iterator[None]:
    """Context that raises its errors also on ranks that wait for this one in a layer of ``model``."""
    try:
        yield
    except Exception as error:
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                tell_peers(layer._group_spec, layer, error)  # the first of each group
        raise


def copied(model: nn.Module) -> nn.Module:
    """Returns a copy of ``model`` in float64."""
    try:
        return copy.deepcopy(model).double()
    except Exception as error:
        raise RuntimeError(
            f"model: expected one that copy.deepcopy can copy, got {type(error).__name__}: {error}; by_layer=True "
            "copies one layer at a time"
        ) from error


def copied_layer(layer: nn.Module) -> nn.Module:
    """Returns a copy of ``layer`` in float64 without hooks, also where ``fully_shard`` forbids ``copy.deepcopy``."""
    own = object.__new__(type(layer))
    nn.Module.__init__(own)
    vars(own).update((name, value) for name, value in vars(layer).items() if name not in vars(own))
    vars(own).pop("_known", None)
    own.training = layer.training
    for tensors in ("_parameters", "_buffers"):
        vars(own)[tensors] = in_float64(vars(layer)[tensors], vars(layer)[tensors])
    vars(own)["_modules"] = {name: child and copied_layer(child) for name, child in layer._modules.items()}
    return own


def alone(module: nn.Module) -> nn.Module:
    """Makes the layers of ``module`` synchronize with no other rank; returns ``module``."""
    for layer in list(module.modules()):
        if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            convert_sync_batchnorm(layer, LOCAL)
    return module


def with_values(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Returns ``module`` with ``values`` in the parameters and buffers of these names."""
    tensors = tensors_of(module)
    for name, value in values.items():
        tensors[name].detach().copy_(value)
    return module


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
