"""DTensor inputs: each rank computes on its shards, with the statistics of the whole tensor.

This module never imports torch.distributed.tensor, which takes a second: if a DTensor exists, user code has imported
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import functional
from .._groups import spec_of
from .._step.call import Call
from .._step.checks import check_dimensions, is_distributed
from ..functional import batch_norm

if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.tensor import DTensor, Placement


def _on_shards(call: Call) -> Tensor | None:
    """Computes ``call`` on the shards of this rank; returns a DTensor placed like the input. Returns None if the input
    is not a DTensor."""
    input, weight, bias, residual = call[:4]
    if not is_distributed(input):
        return None
    shards = _Shards(input)
    mean, var, counter = call.buffers
    mean, var = shards.buffer("running_mean", mean), shards.buffer("running_var", var)
    buffers = mean, var, shards.buffer("num_batches_tracked", counter)
    if call.has_mask:
        raise TypeError("mask: expected None with a DTensor input, got a mask; pass input.to_local() and its mask")
    if call.uses_batch:
        shards.check_group(call.group)
    if residual is not None:
        residual = shards.local("residual", residual, shards.placements)
    # Parameters are converted last, because redistributing them may communicate.
    weight, bias = shards.parameter("weight", weight), shards.parameter("bias", bias)
    output = batch_norm(call._replace(
        input=shards.input.to_local(), weight=weight, bias=bias, residual=residual, buffers=buffers
    ))  # fmt: skip
    # Like the local output, the full output is dense and has the memory format of the input.
    stride = torch.empty_like(torch.empty_strided(input.shape, input.stride(), device="meta")).stride()
    return torch.distributed.tensor.DTensor.from_local(
        output, shards.mesh, shards.placements, run_check=False, shape=input.shape, stride=stride
    )


functional.compute_special = _on_shards


class _Shards:
    """Placements of a DTensor input, and the matching placements of other tensors."""

    def __init__(self, input: Any) -> None:
        check_dimensions(input)
        tensor = torch.distributed.tensor
        self.input: DTensor = input
        self.mesh, self.placements = input.device_mesh, input.placements
        for each in self.placements:
            if each.is_partial():
                raise TypeError(f"input: expected a DTensor that is sharded or replicated, got {each}; redistribute it")
        # Sharded dimension of the input, or None, for each dimension of the mesh.
        dims = [None if each.is_replicate() else each.dim % input.dim() for each in self.placements]
        self._synchronizes = [dim is not None and dim != 1 for dim in dims]
        self._has_all_channels = 1 not in dims
        self._per_channel = tuple(tensor.Shard(0) if dim == 1 else tensor.Replicate() for dim in dims)

    def check_group(self, process_group: Any) -> None:
        """Raises ValueError unless the ranks of ``process_group`` hold each value of the channels once."""
        mesh, coordinate = self.mesh, self.mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"input: expected a DTensor on a mesh that contains this rank, got {mesh}")
        chosen = [slice(None) if synced else at for synced, at in zip(self._synchronizes, coordinate, strict=True)]
        expected = sorted(mesh.mesh[tuple(chosen)].flatten().tolist())
        members = spec_of(process_group).members()  # None for a Communicator without ranks
        got = sorted(set(members or ()).intersection(mesh.mesh.flatten().tolist()))
        if got != expected:
            raise ValueError(
                f"process_group: expected ranks {expected}, which share the samples and positions of this input, got "
                f"ranks {got}; input is a DTensor with placements {self.placements} on {mesh}"
            )

    def local(self, name: str, tensor: Any, placements: tuple[Placement, ...]) -> Any:
        """Returns the shard of ``tensor``; raises TypeError unless it is a DTensor with these ``placements``."""
        if not is_distributed(tensor) or tensor.device_mesh != self.mesh or tensor.placements != placements:
            raise _wrong(name, f"a DTensor with placements {placements} on the input's mesh", tensor)
        return tensor.to_local()

    def buffer(self, name: str, tensor: Any) -> Any:
        """Returns the part of ``tensor`` for this rank's channels, for in-place updates."""
        if self._is_plain(name, tensor):
            return tensor
        replicated = (torch.distributed.tensor.Replicate(),) * len(self.placements)
        with torch.no_grad():
            return self.local(name, tensor, self._per_channel if tensor.dim() else replicated)

    def parameter(self, name: str, tensor: Any) -> Any:
        """Returns the part of ``tensor`` for this rank's channels, from any placement on the mesh.

        The gradient of a DTensor is the gradient for the whole input, placed like the DTensor.
        """
        if self._is_plain(name, tensor):
            return tensor
        if tensor.device_mesh != self.mesh:
            raise _wrong(name, f"a DTensor on the input's mesh, {self.mesh}", tensor)
        grad_placements = [
            torch.distributed.tensor.Partial() if synchronizes else placement
            for synchronizes, placement in zip(self._synchronizes, self._per_channel, strict=True)
        ]
        return tensor.redistribute(placements=self._per_channel).to_local(grad_placements=grad_placements)

    def _is_plain(self, name: str, tensor: Any) -> bool:
        """Returns True for None and plain tensors; raises TypeError if a plain tensor has other ranks' channels."""
        if is_distributed(tensor):
            return False
        if tensor is not None and tensor.dim() and not self._has_all_channels:
            raise _wrong(name, "a DTensor if channels of input are sharded", tensor)
        return True


def _wrong(name: str, expected: str, tensor: Any) -> TypeError:
    got = type(tensor).__name__
    if is_distributed(tensor):
        got = f"a DTensor with placements {tensor.placements} on {tensor.device_mesh}"
    return TypeError(f"{name}: expected {expected}, got {got}")
