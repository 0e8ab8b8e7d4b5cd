"""NCCL's progress on the device."""

import json
from typing import Any

import torch


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
