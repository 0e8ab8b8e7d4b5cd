"""Type of ``process_group`` arguments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # some builds of torch have no torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .communicator import Communicator
    from .spec import RankGroup


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
