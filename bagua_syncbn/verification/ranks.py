"""Ranks that compute together: each knows the results of all, and an error of one is raised on all."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicators.torch_engine import torch_group_of
from ..groups import said_by, spec_of
from ..torch_internals.modules import pytree

_T = TypeVar("_T")


class RankError(RuntimeError):
    """An error of some ranks, raised on all."""


class Peers:
    """Ranks of a group; this process alone where there is no job."""

    def __init__(self, caller: str, process_group: Any) -> None:
        self._caller = caller
        self.in_job = dist.is_available() and dist.is_initialized()
        self.group = torch_group_of(spec_of(process_group)) if self.in_job else None
        self.size = dist.get_world_size(self.group) if self.in_job else 1
        self.rank = dist.get_rank(self.group) if self.in_job else 0

    def together(self, what: str, do: Callable[[], _T]) -> list[_T]:
        """Returns the results of ``do`` on all ranks, in rank order, with tensors on CPU. ``do`` may make such calls.

        Raises:
            RankError: ``do`` raised on some ranks, which the error names. An error that is the same on all ranks is
                raised as it is.
        """
        cause, error, packed = None, "", b""
        try:
            packed = pickle.dumps(pytree.tree_map_only(Tensor, _on_cpu, do()))
        except RankError:
            raise
        except Exception as raised:
            cause, error = raised, f"{type(raised).__name__}: {raised}"
        gathered = [(what, error, packed)] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, (what, error, packed), group=self.group)
        if cause is not None and all(own == error for _, own, _ in gathered):
            raise cause
        said = [(rank, f"{where}: {own}") for rank, (where, own, _) in enumerate(gathered) if own]
        errors = "; ".join(f"{ranks} in {text}" for ranks, text in said_by(said))
        if not errors and any(where != what for where, _, _ in gathered):
            places = said_by((rank, where) for rank, (where, _, _) in enumerate(gathered))
            got = "; ".join(f"{ranks} in {where}" for ranks, where in places)
            errors = f"expected all ranks to call the same layers, got {got}"
        if errors:
            raise RankError(f"{self._caller}: {errors}") from cause
        return [pickle.loads(packed) for _, _, packed in gathered]

    def each(self, what: str, do: Callable[[], _T]) -> _T:
        """Returns the result of ``do`` on this rank, after all have one; raises as :meth:`together`."""
        own: list[_T] = []
        self.together(what, lambda: own.append(do()))
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
    """Returns nested tuples, lists and dicts of tensors as one, joined along the first dimension of each tensor.

    Raises:
        ValueError: ``parts`` differ in other values or in other dimensions.
    """

    def join(path: Any, *row: Any) -> Any:
        place, kinds = name + pytree.keystr(path), "tensors, or the same on all ranks"
        if all(isinstance(part, Tensor) and part.dim() for part in row):
            if len({(part.shape[1:], part.dtype) for part in row}) == 1:
                return torch.cat(row).detach().requires_grad_(row[0].requires_grad)
            row = tuple(f"{list(part.shape)} of {part.dtype}" for part in row)
            kinds = "tensors that differ in their first dimension alone"
        elif len({pickle.dumps(part) for part in row}) == 1:
            return row[0]
        raise ValueError(f"{place}: expected {kinds}, got {', '.join(map(str, row))}; merge makes one batch of others")

    first, *others = map(pytree.tree_structure, parts)
    for other in others:
        if other != first:
            kinds = "the same tuples, lists and dicts on all ranks"
            raise ValueError(f"{name}: expected {kinds}, got {first} and {other}; merge makes one batch of others")
    return pytree.tree_map_with_path(join, *parts)


def share_of(whole: Tensor, shapes: Sequence[Sequence[int]], rank: int) -> Tensor | None:
    """Returns the part of ``rank`` in ``whole``, joined from parts of ``shapes``; None if these do not fit."""
    for dim, size in enumerate(whole.shape):
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if others == {(*whole.shape[:dim], *whole.shape[dim + 1 :])} and sum(shape[dim] for shape in shapes) == size:
            part: Tensor = whole.split([shape[dim] for shape in shapes], dim)[rank]
            return part
    return None


def in_float64(values: Any, like: Any) -> Any:
    """Returns a copy of ``values`` with floating point tensors in float64, on the devices of ``like``.

    If ``like`` has another number of tensors, all go to the device of its first one.
    """
    devices, number = [tensor.device for tensor in tensors_in(like)], len(tensors_in(values))
    places: Iterator[Any] = iter(devices if number == len(devices) else [*devices[:1], "cpu"][:1] * number)

    def placed(tensor: Tensor) -> Tensor:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        copied: Tensor = tensor.detach().to(next(places), dtype, copy=True)
        return copied.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, placed, values)
