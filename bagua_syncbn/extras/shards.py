"""DTensor input: a call computes on the shards of its rank, with the statistics of the whole tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import ops
from ..checks import check_dimensions
from ..groups import spec_of
from ..step.call import Call


def shards_of(call: Call) -> tuple[Call, Callable[[Tensor], Tensor]]:
    """Returns ``call`` on the shards of its tensors, and a function that makes a DTensor of the output's shard.

    Raises:
        TypeError: the input is no DTensor or a sum that is not added up, or another tensor is not placed as it has to
            be; there is a mask.
        ValueError: the ranks of the group do not hold each value of a channel once; this rank is not in the mesh of
            the input.
    """
    input, weight, bias, residual = call[:4]
    shards = _Shards(input)
    mean, var, batches = call.buffers
    mean, var = shards.buffer("running_mean", mean), shards.buffer("running_var", var)
    buffers = ops.Buffers(mean, var, shards.buffer("num_batches_tracked", batches))
    if call.has_masks:
        raise TypeError("mask, lengths: expected none with a DTensor input; call the layer with its to_local()")
    if call.training:
        shards.check_group(call.group)
    own_input, own_residual = shards.own("input", input), shards.own("residual", residual)
    assert own_input is not None
    # Last, because they may communicate.
    weight, bias = shards.parameter("weight", weight), shards.parameter("bias", bias)
    own = call._replace(input=own_input, weight=weight, bias=bias, residual=own_residual, buffers=buffers)
    return own, shards.whole


class _Shards:
    """Placements of a DTensor input (N, C, \\*) and of the other tensors of its call."""

    def __init__(self, input: Tensor) -> None:
        if not isinstance(input, DTensor):
            raise TypeError(f"input: expected a tensor or a DTensor, got {type(input).__name__}")
        check_dimensions(input)
        self._like, self._mesh, self._placements = input, input.device_mesh, input.placements
        dims = [_sharded_dim(placement, input.dim()) for placement in self._placements]
        self._adds_up = [dim is not None and dim != 1 for dim in dims]  # dimensions of the mesh to synchronize over
        self._has_all_channels = 1 not in dims
        self._of_channels: tuple[Placement, ...] = tuple(Shard(0) if dim == 1 else Replicate() for dim in dims)

    def check_group(self, process_group: Any) -> None:
        """Raises ValueError unless the ranks of ``process_group`` hold each value of the channels once."""
        coordinate = self._mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"input: expected a DTensor on a mesh with this rank, got one on {self._mesh}")
        chosen = [slice(None) if adds_up else at for adds_up, at in zip(self._adds_up, coordinate, strict=True)]
        expected = sorted(self._mesh.mesh[tuple(chosen)].flatten().tolist())
        members = spec_of(process_group).members()
        if members is None:
            raise ValueError(
                "process_group: expected a group whose ranks are known, such as a mesh, with a DTensor input, got "
                f"{process_group!r}"
            )
        got = sorted(set(members).intersection(self._mesh.mesh.flatten().tolist()))
        if got != expected:
            raise ValueError(
                f"process_group: expected ranks {expected} of the mesh of input, over which its samples and positions "
                f"are sharded, got ranks {got}; input is a DTensor of placements {self._placements} on {self._mesh}"
            )

    def own(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Returns the shard of ``tensor``, which is placed as the input."""
        if tensor is None:
            return None
        if not isinstance(tensor, DTensor) or not self._is_placed(tensor, self._placements):
            raise TypeError(f"{name}: expected a DTensor placed as input, {self._placements}, got {_described(tensor)}")
        return tensor.to_local()

    def parameter(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Returns the elements of ``tensor`` for the channels of this rank, from any placement on the mesh.

        The gradient of a DTensor is the gradient of the whole input, placed like the DTensor.
        """
        if not isinstance(tensor, DTensor):
            return self._plain(name, tensor)
        if tensor.device_mesh != self._mesh:
            raise TypeError(f"{name}: expected a DTensor on the mesh of input, {self._mesh}, got {_described(tensor)}")
        placements = zip(self._adds_up, self._of_channels, strict=True)
        shares = [Partial() if adds_up else placement for adds_up, placement in placements]
        return tensor.redistribute(placements=self._of_channels).to_local(grad_placements=shares)

    def buffer(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Returns the elements of ``tensor`` for the channels of this rank, or the scalar, for calls to write to."""
        if not isinstance(tensor, DTensor):
            return self._plain(name, tensor)
        placements = self._of_channels if tensor.dim() else (Replicate(),) * len(self._placements)
        if not self._is_placed(tensor, placements):
            raise TypeError(
                f"{name}: expected a DTensor of placements {placements} on the mesh of input, got {_described(tensor)}"
            )
        with torch.no_grad():
            return tensor.to_local()

    def whole(self, output: Tensor) -> Tensor:
        """Returns the DTensor that has ``output`` as its shard on this rank, placed as the input."""
        shape, stride = self._like.shape, self._like.stride()
        stride = torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()
        return DTensor.from_local(output, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)

    def _plain(self, name: str, tensor: Tensor | None) -> Tensor | None:
        if isinstance(tensor, Tensor) and tensor.dim() and not self._has_all_channels:
            raise TypeError(
                f"{name}: expected a DTensor with an input that is sharded over channels, got {_described(tensor)}"
            )
        return tensor

    def _is_placed(self, tensor: DTensor, placements: tuple[Placement, ...]) -> bool:
        return tensor.device_mesh == self._mesh and tensor.placements == placements


def _sharded_dim(placement: Placement, dims: int) -> int | None:
    """Returns which of ``dims`` dimensions is sharded; None for a replicated tensor."""
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise TypeError(f"input: expected a DTensor that is sharded or replicated, got {placement}; redistribute it")
    return int(placement.dim) % dims  # type: ignore[attr-defined]  # Shard and _StridedShard have it


def _described(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor of placements {tensor.placements} on {tensor.device_mesh}"
    return type(tensor).__name__
