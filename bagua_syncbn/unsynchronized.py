"""Warns about a launched job without a process group."""

import os
import warnings

from .functional import first_call_checks
from .groups import EVERYONE, LOCAL, spec_of
from .step.call import Call


@first_call_checks.register
def _warn_without_group(call: Call) -> bool:
    size = os.environ.get("WORLD_SIZE", "1")
    is_launched = call.synchronizes and size.isdecimal() and int(size) > 1
    if is_launched and spec_of(call.group) is EVERYONE and EVERYONE.communicator_if_ready() is LOCAL:
        warnings.warn(
            f"batch normalization is not synchronized: WORLD_SIZE is {size}, and no process group of several ranks was "
            "initialized; call torch.distributed.init_process_group() or bagua.torch_api.init_process_group()",
            stacklevel=2,
        )
    return True
