"""Loads the native library, whose kernels replace the reference kernels."""

import json
import os
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .._sources import digest_of
from .._warnings import warn

_LIBRARY = "bagua_syncbn._C"
WANTED = os.environ.get("BAGUA_SYNCBN_KERNELS") or "native"
"""``"native"``, ``"aten"`` for ATen's kernels instead of native ones on CUDA, or ``"reference"`` for plain torch."""


def _load() -> tuple[str, str]:
    """Returns ``KERNELS`` and ``PROBLEM``."""
    if WANTED not in ("native", "aten", "reference"):
        raise ImportError(f'BAGUA_SYNCBN_KERNELS: expected "native", "aten" or "reference", got {WANTED!r}')
    capability = os.environ.get("BAGUA_SYNCBN_CPU_CAPABILITY") or "baseline"
    if capability not in ("avx512", "avx2", "baseline"):
        raise ImportError(f'BAGUA_SYNCBN_CPU_CAPABILITY: expected "avx512", "avx2" or "baseline", got {capability!r}')
    if WANTED == "reference":
        return "reference", ""
    # Searches only this folder: an editable installation of a different checkout would return that library.
    folder = Path(__file__).parents[1]
    if PathFinder.find_spec(_LIBRARY, [str(folder)]) is None or _is_outdated(folder):
        problem = _explain_missing_library(folder)
        if problem:
            warn(problem, RuntimeWarning)
        return "reference", problem
    library = import_module(_LIBRARY)
    uses_cuda = WANTED == "native" and hasattr(library, "cuda_support")
    return f"native, cpu: {library.cpu_capability()}{', cuda' * uses_cuda}", ""


def build_info(folder: Path) -> dict[str, Any]:
    """Returns the record that setup.py wrote, or {}."""
    record = folder / "build_info.json"
    return json.loads(record.read_text()) if record.exists() else {}


def _is_outdated(folder: Path) -> bool:
    """Returns whether this is a checkout with other sources than the library's, for example after ``git pull``."""
    return digest_of(folder.parent) not in (None, build_info(folder).get("build_sources"))


def _explain_missing_library(folder: Path) -> str:
    """Returns a warning that the ops run in plain torch, or "" if this system cannot build the library."""
    info = build_info(folder)
    if not info:
        message = f"was imported from its sources in {folder}, which contain no native kernels"
        remedy = "Leave that folder to use the installed package, or build the kernels there: pip install -e ."
    elif info["build"] != "python":
        message = f"was not built from the sources in {folder.parent / 'csrc'}"
        remedy = "Build it again, as after each change of these sources: pip install -e ."
    else:
        reason = info["build_reason"]
        if not reason.startswith("no ") or reason == "no Linux":
            return ""
        message = f"was built without native kernels, because setup.py found {reason}"
        remedy = "Once these are installed, build them in a checkout: pip install -e ."
        if reason.startswith("no torch") and "found" not in reason:  # isolated builds miss some
            remedy = f"If torch was installed, activate its environment or pass --no-build-isolation. {remedy}"
    return f"bagua_syncbn {message}: computing in plain torch, several times slower. {remedy}"


KERNELS, PROBLEM = _load()
"""Kernels that compute the ops: ``"reference"``; or ``"native, cpu: "`` and the instruction set, followed by
``", cuda"`` if the library has CUDA kernels and ``WANTED`` is ``"native"``. ``PROBLEM``: the warning, or ""."""
