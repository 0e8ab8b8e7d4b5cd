"""Exchange of Python objects between ranks."""

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from .._groups import ranks_by_text, spec_of
from .._reliability.unsynchronized import check_launch
from .._step.checks import is_distributed
from .._torch.modules import pytree
from ..communicators.c10d import failed
from ..communicators.torch_engine import torch_group_of
from ..statistics.over_ranks import meet

_T = TypeVar("_T")


class Peers:
    """The ranks of a group; only this process if there is no job."""

    def __init__(self, caller: str, module: object, process_group: Any) -> None:
        self._caller, spec = caller, spec_of(process_group)
        self._group = torch_group_of(spec)
        check_launch(caller, spec)
        in_job = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(self._group) if in_job else 1
        self.rank = dist.get_rank(self._group) if in_job else 0
        self._communicator = meet(caller, module, spec, "before its first step")

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
        return result  # pyrefly: ignore[unbound-name]

    def gather(self, value: _T) -> list[_T]:
        """Returns the ``value`` of each rank. Tensors become leaves on CPU, with the same ``requires_grad``."""
        copied = lambda tensor: tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)  # noqa: E731
        value = pytree.tree_map_only(Tensor, copied, value)
        gathered = [value] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(gathered, value, group=self._group)
            except RuntimeError as error:
                raise failed(self._caller, self._communicator, error) from error
        return gathered

    def differing(self, values: dict[str, Any]) -> list[str]:
        """Returns the names whose ``values`` differ between ranks."""
        by_rank = self.gather(values)
        names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
        return [name for name in names if any(of_rank.get(name) != values.get(name) for of_rank in by_rank)]


def digest(tensor: Tensor) -> str:
    """Returns a hash of the values of ``tensor``, or of the local shard of a DTensor."""
    local: Any = tensor.detach()
    values = (local.to_local() if is_distributed(local) else local).cpu().contiguous()
    size = values.numel() * values.element_size()
    data = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
