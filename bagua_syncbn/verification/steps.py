"""Comparison of a float64 training step on the ranks with one process on the merged batch."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .._errors import restored
from .._groups import LOCAL, Communicator, replaced_groups
from .._reliability.probes import report_error
from .._torch.modules import pytree
from ..conversion import convert_sync_batchnorm
from ..conversion.convert import name_layers
from ..sync_batchnorm import SyncBatchNorm
from .ranks import Peers

Loss: TypeAlias = Callable[[Any, Any], Tensor]

Step: TypeAlias = dict[str, Tensor]
"""Results of a step. Keys combine a kind (output, loss, gradient or buffer) with an index or name."""

# Tolerances in float64, relative to a tensor and, because terms may cancel, to the largest tensor of its kind.
_RELATIVE, _OF_LARGEST = 1e-7, 1e-12


class Twin:
    """Communicator that simulates a second rank with equal messages, so that one value per channel is accepted.

    Mean, variance and gradients equal the local ones; counts are doubled.
    """

    size, rank = 2, 0

    def all_gather(self, packed: Tensor) -> Tensor:
        return packed.repeat(2, 1)

    def all_reduce(self, packed: Tensor) -> Tensor:
        return packed.mul_(2)


@dataclass(frozen=True)
class Comparison:
    """Runs training steps on copies of ``model``, which is equal on all ranks."""

    ranks: Peers
    model: nn.Module
    batch: Any
    """Batch of this rank."""
    loss: Loss

    def run_alone(self, what: str, batch: Any, communicator: Communicator = LOCAL) -> Step:
        """Runs a step on ``batch`` in this process. All layers and functions use ``communicator``."""

        def run() -> Step:
            model = self._copied()
            for layer in list(model.modules()):
                if isinstance(layer, nn.SyncBatchNorm):
                    convert_sync_batchnorm(layer, communicator)
            with replaced_groups(communicator):
                return _run(model, _in_float64(batch, self.batch), self.loss)

        return self.ranks.run(what, run)

    def run(self, weight: float = 1.0) -> Step:
        """Runs a step on the ranks, with the loss multiplied by ``weight``."""
        batch = _in_float64(self.batch, self.batch)
        return self.ranks.run("the step on ranks", lambda: _run(self._copied(), batch, self.loss, weight))

    def _copied(self) -> nn.Module:
        try:
            model = copy.deepcopy(self.model).double()
        except Exception as error:
            text = "model: expected a model that can be copied; verify it before fully_shard or with_bagua"
            raise RuntimeError(f"{text} ({error})") from error
        name_layers(model)
        return model

    def combined(self, step: Step) -> Step:
        """Combines a step on the ranks: concatenates outputs, stacks buffers, averages losses and gradients.

        Skips outputs that cannot be concatenated, and tensors that some ranks do not have.
        """
        names = self.ranks.gather([*step])
        combined = {}
        for name in names[0]:
            if not all(name in of_rank for of_rank in names):
                continue
            parts = self.ranks.gather(step[name])
            if tensor_kind(name) != "output":
                stacked = torch.stack(parts)
                combined[name] = stacked if tensor_kind(name) == "buffer" else stacked.mean(0)
            elif all(part.dim() and part.shape[1:] == parts[0].shape[1:] for part in parts):
                combined[name] = torch.cat(parts)
        return combined


def differences(actual: Step, expected: Step) -> dict[str, str]:
    """Returns each tensor's difference as text, "" if equal. Skips outputs whose first dimension is not the batch."""
    found, largest = {}, defaultdict[str, float](float)
    for name, tensor in expected.items():
        largest[tensor_kind(name)] = max(largest[tensor_kind(name)], _largest(_widened(tensor)))
    for name, tensor in actual.items():
        if name not in expected or (tensor_kind(name) == "output" and tensor.shape != expected[name].shape):
            continue
        tensor, wanted = _widened(tensor), _widened(expected[name])
        if tensor.shape[tensor.dim() - wanted.dim() :] != wanted.shape:
            found[name] = f"{name} has size {list(tensor.shape)}, not {list(wanted.shape)}"
            continue
        wanted, size = wanted.expand_as(tensor), _largest(wanted)
        allowed = _RELATIVE * size + _OF_LARGEST * largest[tensor_kind(name)]
        is_equal = torch.allclose(tensor, wanted, rtol=0, atol=allowed if isfinite(allowed) else 0, equal_nan=True)
        error = f"{name} differs by up to {_largest(tensor - wanted):.1e}, of values up to {size:.1e}"
        found[name] = "" if is_equal else error
    return found


def _widened(tensor: Tensor) -> Tensor:
    return tensor.cpu().to(torch.promote_types(tensor.dtype, torch.float64))


def tensor_kind(name: str) -> str:
    """Returns the kind of a tensor, given its name in a :data:`Step` or the description of a difference."""
    return name.split()[0]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _run(model: nn.Module, batch: Any, loss: Loss, weight: float = 1.0) -> Step:
    outputs: list[Tensor] = []
    called: set[nn.Module] = set()
    hooks: list[Any] = []
    ignores_copy = ValueError("loss: expected a function that calls its first argument, an unwrapped copy of the model")
    model.register_forward_hook(lambda _, args, output: outputs.extend(tensors_in(output)))
    try:
        with torch.enable_grad():
            with restored(lambda: [hook.remove() for hook in hooks]):
                hooks.append(register_module_forward_pre_hook(lambda part, _: called.add(part)))
                value = loss(model, batch)
            if called.isdisjoint(model.modules()):
                raise ignores_copy
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = f"size {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"loss: expected a function that returns a scalar tensor, got {got}")
            value = value * weight
            value.backward()
    except Exception as error:
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):  # peers may be waiting in this layer
                report_error(layer._sync_state.group, layer, error)
        if called and called.isdisjoint(model.modules()):  # e.g. the original float32 model got a float64 batch
            raise ignores_copy from error
        raise
    step = {f"output {index}" if len(outputs) > 1 else "output": output for index, output in enumerate(outputs)}
    step["loss"] = value if weight else torch.zeros_like(value)  # an empty batch may have a loss of NaN
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            step[f"gradient {name}"] = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
    step |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return {name: tensor.detach() for name, tensor in step.items()}


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors in nested ``values``."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def joined(batches: Sequence[Any]) -> Any:
    """Concatenates each tensor of nested batches along its first dimension; other values must be equal."""
    if any(pytree.tree_structure(batch) != pytree.tree_structure(batches[0]) for batch in batches):
        raise ValueError("batch: expected the same structure on all ranks, got others; pass merge to combine them")

    def join(*row: Any) -> Any:
        if isinstance(row[0], Tensor) and row[0].dim():
            return torch.cat(row)
        if len({pickle.dumps(value) for value in row}) > 1:
            raise ValueError(f"batch: expected tensors or equal values, got {row!r:.200}; pass merge to combine them")
        return row[0]

    return pytree.tree_map(join, *batches)


def _in_float64(batch: Any, like: Any) -> Any:
    """Returns a copy of ``batch`` with floating point tensors in float64, on the devices of the tensors in ``like``."""
    devices = cycle([tensor.device for tensor in tensors_in(like)] or [torch.device("cpu")])

    def convert(tensor: Tensor) -> Tensor:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(next(devices), dtype, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, convert, batch)
