"""Detects launched jobs without a process group, in which each process would silently train as a single rank."""

import os
from typing import Any

from .._groups import spec_of
from .._groups.spec import rank_and_size
from .._step.call import Call
from .._warnings import warn
from ..functional import first_call_checks


def missing_group(process_group: Any) -> str:
    """Describes the missing group if a launcher started several ranks, but ``process_group`` selects only this rank.

    Returns "" otherwise.
    """
    size, spec = os.environ.get("WORLD_SIZE", "1"), spec_of(process_group)
    is_launched = size.isdecimal() and int(size) > 1
    if not is_launched or rank_and_size()[1] > 1 or spec.given_communicator is not None or spec.rule == 1:
        return ""
    return (
        f"WORLD_SIZE is {size}, and no process group of several ranks was initialized; call "
        "torch.distributed.init_process_group() or bagua.torch_api.init_process_group()"
    )


def check_launch(caller: str, process_group: Any) -> None:
    """Raises RuntimeError if a launcher started several ranks, but ``caller`` would run in this process only."""
    missing = missing_group(process_group)
    if missing:
        raise RuntimeError(f"{caller}: {missing} first, or pass process_group=1 to use only this process")


def warn_at_launch(what: str, process_group: Any) -> None:
    """Warns, with a text that begins with ``what``, if a launcher started several ranks, but training is local."""
    missing = missing_group(process_group)
    if missing:
        warn(f"{what}: {missing}")


def _check_first_call(call: Call) -> bool:
    if call.group is not None:
        warn_at_launch("batch normalization is not synchronized", call.group)
    return True


first_call_checks.append(_check_first_call)
