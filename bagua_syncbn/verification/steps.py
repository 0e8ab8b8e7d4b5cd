"""A float64 training step of a module on the ranks and in one process, and the comparison of the two."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import functional, over_ranks
from ..conversion import convert_sync_batchnorm
from ..errors import notify_peers
from ..groups import LOCAL, spec_of
from ..sync_batchnorm import SyncBatchNorm
from .ranks import Peers, in_float64, tensors_in

Loss: TypeAlias = Callable[[Any, Any], Tensor]

Step: TypeAlias = dict[str, Tensor]
"""Results of a step. Keys combine a kind (output, loss, input-gradient, gradient or buffer) with an index or name."""

Pairs: TypeAlias = dict[str, tuple[Tensor, Tensor]]

# Tolerances in float64, relative to a tensor and, because terms may cancel, to the largest tensor of its kind.
_RELATIVE, _OF_LARGEST = 1e-7, 1e-12


@dataclass(frozen=True)
class Comparison:
    """A step on the ranks, each with its batch, and the same step in one process on the merged batch."""

    ranks: Peers
    copy: Callable[[], nn.Module]
    """Returns a float64 copy of the module, equal on all ranks."""
    batch: Any
    """Batch of this rank."""
    whole: Any
    """Merged batch."""
    loss: Loss

    def run_alone(self) -> Step:
        """Runs the step in one process."""

        def run() -> Step:
            module = self.copy()
            for layer in list(module.modules()):
                if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
                    convert_sync_batchnorm(layer, LOCAL)
            with local_functions(functional, over_ranks):
                return _run(module, in_float64(self.whole, self.batch), self.loss)

        return self.ranks.run("the step in one process", run)

    def run(self, weight: float = 1.0) -> Step:
        """Runs the step on the ranks, with the loss multiplied by ``weight``."""
        step = lambda: _run(self.copy(), in_float64(self.batch, self.batch), self.loss, weight)  # noqa: E731
        return self.ranks.run("the step on ranks", step)

    def pairs(self, actual: Step, expected: Step) -> Pairs:
        """Pairs the tensors of a step on the ranks with the same step in one process.

        Losses and gradients are averaged over ranks. Outputs and input gradients are compared with this rank's part, or
        skipped if the first dimension is not the batch.
        """
        ranks, pairs = self.ranks, {}
        shapes = ranks.gather({name: tuple(tensor.shape) for name, tensor in actual.items()})
        for name, whole in expected.items():
            if not all(name in of_rank for of_rank in shapes):
                continue
            tensor, kind = actual[name], kind_of(name)
            if kind in ("loss", "gradient"):
                tensor = ranks.mean(tensor)
            elif kind in ("output", "input-gradient"):
                parts = [of_rank[name] for of_rank in shapes]
                sizes = [part[0] for part in parts if part and part[1:] == whole.shape[1:]]
                if len(sizes) < ranks.size or sum(sizes) != len(whole):
                    continue
                whole = whole.split(sizes)[ranks.rank]
                tensor = tensor / ranks.size if kind == "input-gradient" else tensor
            pairs[name] = tensor, whole
        return pairs


def first_difference(ranks: Peers, pairs: Pairs) -> str:
    """Describes the first pair that differs on any rank, on the rank with the largest error; empty if all pairs are
    equal."""
    return min(ranks.gather(_first_difference(pairs, ranks.rank)))[2]


def _first_difference(pairs: Pairs, rank: int) -> tuple[float, float, str]:
    """Returns index, negated error and description of the first pair that differs on this rank."""
    largest: dict[str, float] = {}
    for name, (_, expected) in pairs.items():
        largest[kind_of(name)] = max(largest.get(kind_of(name), 0.0), _largest(expected))
    for index, (name, (actual, expected)) in enumerate(pairs.items()):
        if actual.shape != expected.shape:
            return index, -inf, f"{name} has size {list(actual.shape)} on rank {rank}, not {list(expected.shape)}"
        dtype = torch.promote_types(expected.dtype, torch.float64)
        actual, expected = actual.detach().to(dtype), expected.detach().to(dtype)
        size, error = _largest(expected), _largest(actual - expected)
        allowed = _RELATIVE * size + _OF_LARGEST * largest[kind_of(name)]
        if not torch.isclose(actual, expected, 0, allowed if isfinite(allowed) else 0, equal_nan=True).all():
            return index, -error, f"{name} differs by up to {error:.1e} on rank {rank}, of values up to {size:.1e}"
    return inf, 0.0, ""


def kind_of(name: str) -> str:
    """Returns the kind of a tensor, given its name in a :data:`Step` or the description of a difference."""
    return name.split()[0]


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _run(module: nn.Module, batch: Any, loss: Loss, weight: float = 1.0) -> Step:
    """Runs a step of ``module``."""
    outputs: list[Tensor] = []
    module.register_forward_hook(lambda _, args, output: outputs.extend(tensors_in(output)))
    try:
        with torch.enable_grad():
            value = loss(module, batch) * weight
            value.backward()
    except Exception as error:
        for layer in module.modules():
            if isinstance(layer, SyncBatchNorm):  # peers may be waiting in this layer
                notify_peers(layer._sync_state.group, layer, error)
        raise
    step = {f"output {index}" if len(outputs) > 1 else "output": output for index, output in enumerate(outputs)}
    step["loss"] = value.detach() if weight else torch.zeros_like(value)  # an empty batch may have a loss of NaN
    inputs = [tensor for tensor in tensors_in(batch) if tensor.requires_grad]
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    step |= {f"input-gradient {index}": _gradient(tensor) for index, tensor in enumerate(inputs)}
    step |= {f"gradient {name}": _gradient(parameter) for name, parameter in trained.items()}
    return step | {f"buffer {name}": buffer for name, buffer in module.named_buffers()}


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.to_dense()


@contextmanager
def local_functions(*modules: Any) -> Iterator[None]:
    """Context manager in which the functions of ``modules`` do not synchronize, regardless of ``process_group``."""
    for module in modules:
        module.spec_of = lambda _: spec_of(LOCAL)  # in all threads, because replicas also call functions
    try:
        yield
    finally:
        for module in modules:
            module.spec_of = spec_of


class Layers(nn.Module):
    """Float64 copies of layers, by name. The forward pass takes a list of calls: name, args and kwargs."""

    def forward(self, calls: list[tuple[str, Any, Any]]) -> list[Any]:
        return [self._modules[name](*args, **kwargs) for name, args, kwargs in calls]  # type: ignore[misc]


def copied(module: nn.Module) -> nn.Module:
    """Returns a copy of a layer, or of :class:`Layers`, in float64, without hooks, contexts and ``fully_shard``."""
    clone = object.__new__(type(module))
    nn.Module.__init__(clone)
    vars(clone).update((name, value) for name, value in vars(module).items() if name not in vars(clone))
    if isinstance(module, SyncBatchNorm):
        vars(clone)["_sync_state"] = copy.copy(module._sync_state)
    for tensors in ("_parameters", "_buffers"):
        vars(clone)[tensors] = in_float64(vars(module)[tensors], vars(module)[tensors])
    vars(clone)["_modules"] = {name: child and copied(child) for name, child in module._modules.items()}
    return clone
