"""Exchange of Python objects between ranks, and helpers for nested batches of tensors."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicators.torch_engine import torch_group_of
from ..groups import ranks_by_text, spec_of
from ..torch_internals.modules import pytree

_T = TypeVar("_T")


class Peers:
    """The ranks of a group; only this process if there is no job."""

    def __init__(self, caller: str, process_group: Any) -> None:
        self._caller = caller
        self.in_job = dist.is_available() and dist.is_initialized()
        self.group = torch_group_of(spec_of(process_group)) if self.in_job else None
        self.size = dist.get_world_size(self.group) if self.in_job else 1
        self.rank = dist.get_rank(self.group) if self.in_job else 0

    def run(self, step: str, compute: Callable[[], _T]) -> _T:
        """Returns the result of ``compute`` once it has returned on all ranks.

        Raises:
            RuntimeError: ``compute`` raised on some ranks. An error that all ranks raise is raised unchanged.
        """
        cause, text = None, ""
        try:
            result = compute()
        except Exception as error:
            cause, text = error, f"{step}: {type(error).__name__}: {error}"
        texts = self.gather(text)
        if cause is not None and len({*texts}) == 1:
            raise cause
        if any(texts):
            by_text = ranks_by_text((rank, text) for rank, text in enumerate(texts) if text)
            errors = "; ".join(f"{ranks} in {text}" for ranks, text in by_text)
            raise RuntimeError(f"{self._caller}: {errors}") from cause
        return result

    def gather(self, value: _T) -> list[_T]:
        """Returns the ``value`` of each rank, with tensors on CPU."""
        value = pytree.tree_map_only(Tensor, _on_cpu, value)
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def differing(self, values: dict[str, Any]) -> list[str]:
        """Returns the names whose ``values`` differ between ranks."""
        by_rank = self.gather(values)
        names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
        return [name for name in names if any(of_rank.get(name) != values.get(name) for of_rank in by_rank)]

    def mean(self, tensor: Tensor) -> Tensor:
        """Returns the mean of ``tensor`` over ranks."""
        total = tensor.clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total / self.size


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors in nested ``values``."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)


def joined(batches: Sequence[Any]) -> Any:
    """Concatenates each tensor of nested batches along its first dimension; other values must be equal."""
    if any(pytree.tree_structure(batch) != pytree.tree_structure(batches[0]) for batch in batches):
        raise ValueError("batch: expected the same structure on all ranks; or pass merge")

    def join(*row: Any) -> Any:
        if isinstance(row[0], Tensor) and row[0].dim():
            return torch.cat(row).detach().requires_grad_(row[0].requires_grad)
        if len({pickle.dumps(value) for value in row}) > 1:
            raise ValueError(f"batch: expected tensors, or equal values on all ranks, got {row}; or pass merge")
        return row[0]

    return pytree.tree_map(join, *batches)


def in_float64(values: Any, like: Any) -> Any:
    """Returns a copy of ``values`` with floating point tensors in float64, on the devices of the tensors in ``like``.

    If ``like`` has a different number of tensors, all go to the device of its first tensor.
    """
    number, devices = len(tensors_in(values)), [tensor.device for tensor in tensors_in(like)]
    targets = iter(devices if len(devices) == number else [*devices, torch.device("cpu")][:1] * number)

    def convert(tensor: Tensor) -> Tensor:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(next(targets), dtype, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, convert, values)
