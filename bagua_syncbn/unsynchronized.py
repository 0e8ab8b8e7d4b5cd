"""Warns about a launched job without a process group."""

import functools
import os
import warnings

from .functional import first_call_checks
from .groups import EVERYONE, LOCAL, spec_of
from .step.call import Call


@first_call_checks.register
def _warn_without_group(call: Call) -> bool:
    if call.synchronizes and spec_of(call.group) is EVERYONE and EVERYONE.communicator_if_ready() is LOCAL:
        _warn_if_launched_with_others()
    return True


@functools.cache
def _warn_if_launched_with_others() -> None:
    """Warns once if a launcher started several ranks, and no process group was initialized."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        warnings.warn(
            f"batch normalization is not synchronized: WORLD_SIZE is {size}, and no process group of several ranks was "
            "initialized; call torch.distributed.init_process_group() or bagua.torch_api.init_process_group()",
            stacklevel=2,
        )
