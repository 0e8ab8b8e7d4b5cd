"""Counts device work and host waits in a trace of torch's profiler."""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_RANGE = "bagua_syncbn: counted"
_ON_DEVICE = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
# CUDA calls that block the host. cudaMemcpyAsync also blocks if memory is not pinned, but then torch waits for the
# stream too. Names from CUPTI may end in a version, such as cudaStreamSynchronize_ptsz_v7000.
_WAITS = re.compile(r"((cuda|cu)(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy)(_pt[sd][sz])?(_v\d+)?")


def trace(call: Callable[[], object], wait: Callable[[], None]) -> dict[str, Any]:
    """Runs ``call`` under the profiler; returns the trace in Chrome's format."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    wait()
    with profile(activities=activities) as prof:
        with record_function(_RANGE):
            call()
        wait()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        prof.export_chrome_trace(str(path))
        recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded


def count(recorded: dict[str, Any]) -> dict[str, Any]:
    """Counts ``kernels``, ``copies`` and ``fills`` on the device, and ``collectives``, ``waits`` and other CUDA
    ``runtime`` calls. Also returns the ``names`` of kernels and waits.

    If ``runtime`` is 0, the profiler cannot see the device, and the counts are invalid.
    """
    events = [event for event in recorded["traceEvents"] if event.get("ph") == "X"]
    (counted,) = (e for e in events if e.get("cat") == "user_annotation" and e["name"] == _RANGE)
    begin, end = counted["ts"], counted["ts"] + counted["dur"]
    # The trace contains only device work of the call, and the final wait after it.
    during = [event for event in events if begin <= event["ts"] <= end]
    result: dict[str, Any] = dict.fromkeys((*_ON_DEVICE.values(), "collectives", "waits", "runtime"), 0)
    names = []
    for event in events:
        kind = _ON_DEVICE.get(event.get("cat"))
        if kind is not None:
            result[kind] += 1
        if kind == "kernels":
            names.append(event["name"])
    for event in during:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            waits = _WAITS.fullmatch(event["name"]) is not None
            result["waits" if waits else "runtime"] += 1
            names += [event["name"]] * waits
        if event.get("cat") == "cpu_op" and event["name"].startswith("c10d::"):
            result["collectives"] += 1
    return {**result, "names": sorted(names)}
