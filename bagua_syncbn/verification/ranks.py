"""Ranks that compare results: each rank gets all results, and an error on one rank is raised on all."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicators.torch_engine import torch_group_of
from ..groups import ranks_by_text, spec_of
from ..torch_internals.modules import pytree

_T = TypeVar("_T")


class RankError(RuntimeError):
    """An error on some ranks, raised on all."""


class Peers:
    """The ranks of a group; only this process if there is no job."""

    def __init__(self, caller: str, process_group: Any) -> None:
        self._caller = caller
        self.in_job = dist.is_available() and dist.is_initialized()
        self.group = torch_group_of(spec_of(process_group)) if self.in_job else None
        self.size = dist.get_world_size(self.group) if self.in_job else 1
        self.rank = dist.get_rank(self.group) if self.in_job else 0

    def gather(self, step: str, compute: Callable[[], _T]) -> list[_T]:
        """Returns the results of ``compute`` on all ranks, in rank order, with tensors on CPU. Calls may be nested.

        Raises:
            RankError: ``compute`` raised on some ranks, or ranks are in different steps. An error that is the same on
                all ranks is raised unchanged.
        """
        cause, error, result = None, "", b""
        try:
            result = pickle.dumps(pytree.tree_map_only(Tensor, _on_cpu, compute()))
        except RankError:
            raise
        except Exception as raised:
            cause, error = raised, f": {type(raised).__name__}: {raised}"
        gathered = [(step, error, result)] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, gathered[0], group=self.group)
        steps, errors, results = zip(*gathered, strict=True)
        if cause is not None and len({*errors}) == 1:
            raise cause
        if any(errors) or len({*steps}) > 1:
            where = [
                (rank, f"{steps[rank]}{errors[rank]}") for rank in range(self.size) if errors[rank] or not any(errors)
            ]
            text = "; ".join(f"{ranks} in {step}" for ranks, step in ranks_by_text(where))
            raise RankError(
                f"{self._caller}: {text if any(errors) else f'ranks call different layers: {text}'}"
            ) from cause
        return [pickle.loads(result) for result in results]

    def run(self, step: str, compute: Callable[[], _T]) -> _T:
        """Returns the result of ``compute`` on this rank once all ranks have one; raises like :meth:`gather`."""
        own: list[_T] = []
        self.gather(step, lambda: own.append(compute()))
        return own[0]

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


def joined(parts: Sequence[Any], name: str) -> Any:
    """Concatenates each tensor of nested tuples, lists and dicts along its first dimension.

    Raises:
        ValueError: ``parts`` differ in structure, in other dimensions or in values that are not tensors.
    """
    hint = "pass merge, which makes one batch of a list of batches"
    first, *others = map(pytree.tree_structure, parts)
    for other in others:
        if other != first:
            raise ValueError(f"{name}: expected the same structure on all ranks, got {first} and {other}; {hint}")

    def join(path: Any, *row: Any) -> Any:
        if all(isinstance(part, Tensor) and part.dim() for part in row):
            if len({(part.shape[1:], part.dtype) for part in row}) == 1:
                return torch.cat(row).detach().requires_grad_(row[0].requires_grad)
            expected = "tensors that differ only in their first dimension"
            row = tuple(f"{list(part.shape)} of {part.dtype}" for part in row)
        elif len({pickle.dumps(part) for part in row}) == 1:
            return row[0]
        else:
            expected = "tensors, or equal values on all ranks"
        raise ValueError(f"{name}{pytree.keystr(path)}: expected {expected}, got {', '.join(map(str, row))}; {hint}")

    return pytree.tree_map_with_path(join, *parts)


def share_of(whole: Tensor, shapes: Sequence[Sequence[int]], rank: int) -> Tensor | None:
    """Returns the part of ``rank`` if ``whole`` is a concatenation of tensors of ``shapes``; otherwise None."""
    for dim, size in enumerate(whole.shape):
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if others == {(*whole.shape[:dim], *whole.shape[dim + 1 :])} and sum(shape[dim] for shape in shapes) == size:
            part: Tensor = whole.split([shape[dim] for shape in shapes], dim)[rank]
            return part
    return None


def in_float64(values: Any, like: Any) -> Any:
    """Returns a copy of ``values`` with floating point tensors in float64, on the devices of the tensors in ``like``.

    If ``like`` has a different number of tensors, all go to the device of its first one.
    """
    devices, number = [tensor.device for tensor in tensors_in(like)], len(tensors_in(values))
    places: Iterator[Any] = iter(devices if number == len(devices) else [*devices[:1], "cpu"][:1] * number)

    def placed(tensor: Tensor) -> Tensor:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        copied: Tensor = tensor.detach().to(next(places), dtype, copy=True)
        return copied.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, placed, values)
