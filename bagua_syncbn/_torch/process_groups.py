"""Process groups of torch.distributed, and NCCL's progress on the device."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed this method of groups.
GATHER_METHOD = "all_gather_single" if hasattr(dist, "all_gather_single") else "_allgather_base"


def in_stream(kind: str) -> Any:
    """Returns ``"Allreduce"`` or ``"Allgather"`` options that make NCCL use the current stream."""
    options = getattr(dist.distributed_c10d, f"{kind}Options")()
    options.asyncOp = False
    return options


def traced_all_gather(packed: torch.Tensor, size: int, group_name: str) -> torch.Tensor:
    """Returns all ranks' rows in a torch.compile graph, which holds the group's name instead of the group."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, size, group_name)
    rows: torch.Tensor = torch.ops._c10d_functional.wait_tensor(gathered).view(size, -1)
    return rows


def traced_all_reduce(packed: torch.Tensor, group_name: str) -> torch.Tensor:
    """Returns the sum over ranks in a torch.compile graph, see :func:`traced_all_gather`."""
    reduced = torch.ops._c10d_functional.all_reduce(packed, "sum", group_name)
    total: torch.Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
    return total


def group_named(name: str) -> Any:
    """Returns the process group named ``name``."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._resolve_process_group(name)


def backend_and_store(group: Any) -> tuple[Any, Any]:
    """Returns the backend's name and the store of a live group."""
    return dist.distributed_c10d._world.pg_map[group]


def timeout_of(group: Any) -> timedelta:
    """Returns the timeout of the group's collectives, or of its store if the backend has none."""
    backends = (group._get_backend(device) for device in group._device_types)
    options = (getattr(backend, "options", None) for backend in backends)  # some backends have no timeout
    timeouts = (found._timeout for found in options if found is not None)
    return next(timeouts, None) or backend_and_store(group)[1].timeout


def device_in(group: Any, preferred: torch.device) -> torch.device:
    """Returns ``preferred`` if the group sends tensors on this type of device, else a device of the group."""
    kinds = [device.type for device in getattr(group, "_device_types", ())]
    return preferred if not kinds or preferred.type in kinds else torch.device(kinds[0])


def is_gloo_on_cpu(group: Any) -> bool:
    """Returns whether the group sends CPU tensors through gloo."""
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except (AttributeError, RuntimeError):  # the group has no CPU backend, or is not a real group
        return False


def make_group(ranks: Sequence[int], model: Any, store: Any, name: str, device: Any = None) -> Any:
    """Creates a group with the backend and timeout of the group ``model``. All ``ranks`` make this call.

    Args:
        device: the device that NCCL is bound to in the job, or None.
    """
    c10d: Any = dist.distributed_c10d
    world: Any = dist.group.WORLD
    with _unbound(world, device):
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(world.rank()),
            list(ranks),
            backend_and_store(model)[0],
            store,
            name,
            timeout=timeout_of(model),
            group_desc="bagua_syncbn",
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


_unbinding = Lock()


@contextmanager
def _unbound(world: Any, device: Any) -> Iterator[None]:
    """Keeps torch from creating NCCL communicators by splitting the job's communicator, which involves all ranks.

    torch splits the job's communicator if the default group is bound to a device.
    """
    if device is None:
        yield
        return
    with _unbinding:
        world.bound_device_id = None
        try:
            yield
        finally:
            world.bound_device_id = device


def nccl_id(group: Any) -> str:
    """Returns the group's number in torch's flight recorder, or "" without NCCL."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == "nccl":
            return str(getattr(backend, "uid", ""))
    return ""


def nccl_progress(number: str) -> tuple[int, int]:
    """Returns how many of the group's collectives have started and completed outside CUDA graphs; zeros if unknown.

    Args:
        number: the :func:`nccl_id` of the group.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if not number or dump is None:
        return 0, 0
    status = json.loads(dump(False, False)).get("pg_status", {}).get(number, {})
    enqueued, completed = (int(status.get(f"last_{what}_collective", 0)) for what in ("enqueued", "completed"))
    return enqueued, max(completed, 0)
