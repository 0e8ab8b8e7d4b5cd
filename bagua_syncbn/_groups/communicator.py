"""Interface of communicators (a size, a rank and two collectives), and the type of ``process_group`` arguments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:  # some builds of torch have no torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .spec import RankGroup


@runtime_checkable
class Communicator(Protocol):
    """Exchanges packed tensors between the ranks of a group. All ranks must make the same calls in the same order.

    Tensors are float32 or float64; both collectives must support both. If sums in float64 are slow, because they are
    computed from gathered values, set the attribute ``sums_float64 = False``: groups of any size then gather
    statistics.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""

    def all_gather(self, packed: Tensor) -> Tensor:
        """Returns a tensor (size, n): row ``r`` is the contiguous ``packed`` (n) of rank ``r``."""

    def all_reduce(self, packed: Tensor) -> Tensor:
        """Returns the sum over ranks of the contiguous ``packed`` (n), which may be overwritten."""


class LocalCommunicator:
    """Communicator of a single rank: collectives return their input."""

    size = 1
    rank = 0

    def all_gather(self, packed: Tensor) -> Tensor:
        return packed.unsqueeze(0)

    def all_reduce(self, packed: Tensor) -> Tensor:
        return packed


LOCAL = LocalCommunicator()


class BaguaProcessGroup(Protocol):
    """Protocol of ``bagua.torch_api.communication.BaguaProcessGroup``, which this package does not import."""

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks of the members."""

    @property
    def group_name(self) -> str:
        """Name by which the members find each other."""


_Group: TypeAlias = "ProcessGroup | DeviceMesh | BaguaProcessGroup | Communicator"

ProcessGroupLike: TypeAlias = "None | int | str | Sequence[Sequence[int]] | RankGroup | _Group"
"""Ranks that synchronize; docs/groups.md describes each kind. The only string is ``"node"``."""
