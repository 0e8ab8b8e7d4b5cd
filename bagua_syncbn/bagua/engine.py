"""Engine for Bagua jobs: collectives through Bagua's communicators, ordered by CUDA events.

This module imports Bagua only in a running Bagua job, because the import needs NCCL.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._groups import Communicator, RankGroup, text_of_argument
from .._groups.spec import Rule, members_by, rank_and_size
from .._torch.modules import defined_in
from ..communicators.torch_engine import running_job


class BaguaCommunicator:
    """Collectives of a Bagua group that only layers use, on a separate CUDA stream.

    Bagua sends gradients through the job's groups in a background thread. If two threads shared an NCCL communicator,
    ranks could enqueue their collectives in different orders. Collectives run after earlier work in the caller's stream
    and before later work there; the host does not wait.

    Tensors are on the device of this rank. Bagua does not support float64: such tensors are sent as int64, and
    receivers sum them in rank order.
    """

    sums_float64 = False

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks = tuple(group.ranks)
        self.size = len(group.ranks)
        self.rank: int = group.ranks.index(dist.get_rank())
        self.device = _device()
        self._engine = group.get_global_communicator()
        # torch.compile graphs break here. A decorator would import the compiler in every process.
        self.all_gather = torch.compiler.disable(self._all_gather)
        self.all_reduce = torch.compiler.disable(self._all_reduce)

    def _all_gather(self, packed: Tensor) -> Tensor:
        packed = self._checked(packed)
        bits = packed.view(torch.int64) if packed.dtype == torch.float64 else packed
        gathered = bits.new_empty(self.size * bits.numel())
        with self._ordered():
            self._engine.allgather(_backend_tensor(bits), _backend_tensor(gathered))
        return gathered.view(packed.dtype).view(self.size, -1)

    def _all_reduce(self, packed: Tensor) -> Tensor:
        if packed.dtype == torch.float64:
            return self._all_gather(packed).sum(0)
        packed = self._checked(packed)
        with self._ordered():
            self._engine.allreduce_inplace(_backend_tensor(packed), int(_communication().ReduceOp.SUM))
        return packed

    def _checked(self, packed: Tensor) -> Tensor:
        """Makes ``packed`` contiguous, because Bagua passes only its address and size to NCCL."""
        if packed.device != self.device:
            raise RuntimeError(f"input: expected a tensor on {self.device}, this rank's device, got {packed.device}")
        return packed.contiguous()

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Makes the communicator's stream wait for the caller's stream; at the end, the caller's stream waits.

        Messages need no ``record_stream``: the allocator reuses their memory in the caller's stream, which waits.
        """
        caller, stream = torch.cuda.current_stream(self.device), self.group.stream
        stream.wait_stream(caller)
        try:
            yield
        finally:
            caller.wait_stream(stream)


def installed_version() -> str | None:
    """Returns Bagua's version, or None if it is not installed. Does not import Bagua, which needs NCCL."""
    distributions = packages_distributions().get("bagua")
    return version(distributions[0]) if distributions else None


def default_group() -> Any:
    """Returns Bagua's default group, or None before ``bagua.torch_api.init_process_group()``."""
    return getattr(_communication(), "_default_pg", None)  # another thread may be importing Bagua


def is_running() -> bool:
    """Returns whether Bagua runs. torch.distributed then runs as well, with the same ranks."""
    return default_group() is not None


def is_data_parallel(module: nn.Module) -> bool:
    """Returns whether Bagua has made ``module`` data parallel."""
    return bool({"bagua_ddp", "_bagua_states"} & vars(module).keys())


def is_process_group(process_group: object) -> bool:
    """Returns whether ``process_group`` is a BaguaProcessGroup. Raises RuntimeError if Bagua is not initialized."""
    if not isinstance(process_group, defined_in("bagua.torch_api.communication", "BaguaProcessGroup")):
        return False
    if default_group() is None:
        raise RuntimeError("process_group: Bagua does not run yet; call bagua.torch_api.init_process_group() first")
    return True


def rule_and_getter(process_group: Any) -> tuple[Rule, Callable[[], Any]] | None:
    """Returns the rule of a BaguaProcessGroup and a function that returns the group; None otherwise.

    Raises:
        ValueError: this rank is not in the group.
        RuntimeError: Bagua is not initialized.
    """
    if not is_process_group(process_group):
        return None
    rule = None if process_group is default_group() else RankGroup(tuple(sorted(process_group.ranks)))
    members_by(rule, *rank_and_size())  # raises if the job has no such ranks
    return rule, lambda: process_group


def communicator_of(rule: Rule, given: Any, creates: bool) -> Communicator | None:
    """Returns the layers' communicator, or None if it does not exist and ``creates`` is False."""
    # Bagua's constructor of a group waits for all members while it holds the GIL. This could deadlock, because a late
    # member may be waiting for this rank's Bagua scheduler, which needs the GIL. So the job makes members meet first.
    return running_job().communicator("layers", rule, None, creates, make_communicator)


def make_communicator(ranks: tuple[int, ...]) -> BaguaCommunicator:
    """Creates a communicator with a new group like Bagua's ``new_group``, but named after its ranks.

    ``new_group`` numbers groups. Ranks outside this group do not make this call, so the numbers of later groups would
    differ, and ranks would wait for each other forever.
    """
    communication = _communication()
    name = f"bagua_syncbn:{','.join(map(str, ranks))}"
    # High priority, because the layers' messages are small and computation waits for them.
    group = communication.BaguaProcessGroup(list(ranks), torch.cuda.Stream(_device(), priority=-1), name)
    communication._pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    communication._pg_map[name] = group
    return BaguaCommunicator(group)


def to_bagua_group(process_group: Any) -> Any:
    """Returns the BaguaProcessGroup for a torch group, which all ranks of the job create.

    Returns None and a BaguaProcessGroup unchanged. Raises TypeError otherwise.
    """
    if process_group is None or is_process_group(process_group):
        return process_group
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "process_group: expected None, a BaguaProcessGroup or a torch.distributed.ProcessGroup in a Bagua job, "
            f"got {text_of_argument(process_group)}"
        )
    return _communication().from_torch_group(process_group)


def broadcast(tensor: Tensor, group: Any) -> Tensor:
    """Returns the uint8 ``tensor`` of the group's first rank, on this rank's device."""
    tensor = tensor.to(_device())
    _communication().broadcast(tensor, src=0, comm=group.get_global_communicator())
    return tensor


def resolve_algorithm(algorithm: Any) -> Any:
    """Returns Bagua's algorithm object for a class or a name in Bagua's registry; returns objects unchanged."""
    if not isinstance(algorithm, str):
        return algorithm() if isinstance(algorithm, type) else algorithm
    from bagua.torch_api.algorithms import Algorithm

    return Algorithm.init(algorithm)


def _communication() -> Any:
    return sys.modules.get("bagua.torch_api.communication")


def _device() -> torch.device:
    """Returns the CUDA device that Bagua's communicators use."""
    return torch.device("cuda", sys.modules["bagua.torch_api.env"].get_local_rank())


def _backend_tensor(tensor: Tensor) -> Any:
    """Returns a Bagua handle for ``tensor``; it keeps a view of the tensor alive."""
    view: Any = tensor.to_bagua_tensor()  # pyrefly: ignore[missing-attribute]
    handle = view.bagua_backend_tensor()
    # View and handle reference each other, the handle in Rust, invisible to the garbage collector. This line prevents a
    # leak of sent tensors.
    del view._bagua_backend_tensor
    return handle
