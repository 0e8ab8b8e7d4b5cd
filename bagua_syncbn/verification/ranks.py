"""Ranks that verify together: what one finds all know, and an error of one is an error of all."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicators import spec_of
from ..torch_internals import pytree

_T = TypeVar("_T")


class RankError(RuntimeError):
    """An error of some ranks that all know of."""


class Ranks:
    """Ranks of a group, or this process alone where there is no job."""

    def __init__(self, process_group: Any) -> None:
        in_job = dist.is_available() and dist.is_initialized()
        self.group = spec_of(process_group).torch_group() if in_job else None
        self.size = dist.get_world_size(self.group) if in_job else 1
        self.rank = dist.get_rank(self.group) if in_job else 0

    def together(self, what: str, do: Callable[[], _T]) -> list[_T]:
        """Returns the results of ``do`` on all ranks, in their order; their tensors are on CPU.

        Raises:
            RankError: ``do`` raised on some ranks. It is raised on all, and names these. ``do`` may make such calls
                itself: an error of one rank ends it on all. An error that is the same on all ranks is raised as it is.
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
        places = [f"rank {rank} in {where}" for rank, (where, _, _) in enumerate(gathered)]
        errors = "; ".join(f"{place}: {own}" for place, (_, own, _) in zip(places, gathered, strict=True) if own)
        if not errors and any(where != what for where, _, _ in gathered):
            errors = f"expected all ranks to call the same layers, got {'; '.join(places)}"
        if errors:
            raise RankError(f"verify_synchronization: {errors}") from cause
        return [pickle.loads(packed) for _, _, packed in gathered]

    def each(self, what: str, do: Callable[[], _T]) -> _T:
        """Returns the result of ``do`` on this rank, after all have one; raises as :meth:`together`."""
        own: list[_T] = []
        self.together(what, lambda: own.append(do()))
        return own[0]

    def add_up(self, tensor: Tensor) -> Tensor:
        """Adds up ``tensor`` over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors in nested ``values``."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)


def joined(parts: Sequence[Any], name: str) -> Any:
    """Returns nested tuples, lists and dicts of tensors as one, joined along the first dimension of each tensor.

    Raises:
        ValueError: other values differ between ``parts``, or so do other dimensions.
    """
    flat = [pytree.tree_flatten_with_path(part) for part in parts]
    (leaves, structure), *_ = flat
    unlike = next((other for _, other in flat if other != structure), None)
    if unlike is not None:
        raise ValueError(
            f"{name}: expected tuples, lists and dicts alike on all ranks, got {structure} and {unlike}; merge makes "
            "one batch of others"
        )
    rows = zip(*([leaf for _, leaf in leaves] for leaves, _ in flat), strict=True)
    whole = [_joined(row, name + pytree.keystr(path)) for (path, _), row in zip(leaves, rows, strict=True)]
    return pytree.tree_unflatten(whole, structure)


def _joined(parts: tuple[Any, ...], name: str) -> Any:
    first = parts[0]
    if all(isinstance(part, Tensor) and part.dim() for part in parts):
        if len({(part.shape[1:], part.dtype) for part in parts}) == 1:
            return torch.cat(parts).detach().requires_grad_(first.requires_grad)
        got = ", ".join(f"{list(part.shape)} of {part.dtype}" for part in parts)
        raise ValueError(f"{name}: expected tensors of ranks that differ in their first dimension alone, got {got}")
    if len({pickle.dumps(part) for part in parts}) > 1:
        raise ValueError(f"{name}: expected tensors, or the same on all ranks, got {parts}; merge makes one batch")
    return first


def share_of(whole: Tensor, shapes: Sequence[Sequence[int]], rank: int) -> Tensor | None:
    """Returns the part of ``rank`` in ``whole``, of which ranks have parts of ``shapes``; None if these do not fit."""
    for dim, size in enumerate(whole.shape):
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if others == {(*whole.shape[:dim], *whole.shape[dim + 1 :])} and sum(shape[dim] for shape in shapes) == size:
            part: Tensor = whole.split([shape[dim] for shape in shapes], dim)[rank]
            return part
    return None


def in_float64(values: Any, like: Any) -> Any:
    """Returns ``values`` with copies of tensors: in float64 if of floating point, and on the devices of ``like``.

    Where ``like`` has another number of tensors, all are on the device of its first one.
    """
    devices, number = [tensor.device for tensor in tensors_in(like)], len(tensors_in(values))
    places: Iterator[Any] = iter(devices if number == len(devices) else [*devices[:1], "cpu"][:1] * number)

    def placed(tensor: Tensor) -> Tensor:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        copied: Tensor = tensor.detach().to(next(places), dtype, copy=True)
        return copied.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, placed, values)
