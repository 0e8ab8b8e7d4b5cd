"""The records in which ops note what they found wrong, where no host waits for them."""

import ctypes

import torch
from torch import Tensor

from .. import ops
from ..torch_internals import outside_of_modes


class FaultRecord:
    """The memory of the host that ops of one kind of device write to, see :mod:`bagua_syncbn.ops.schemas`."""

    def __init__(self, pinned: bool) -> None:
        with outside_of_modes():
            self.tensor = torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=pinned)
        # Read without an op: every call looks at it.
        self.kind = ctypes.c_int64.from_address(self.tensor.data_ptr())

    def take(self) -> list[int]:
        """Returns what was written, and clears the record.

        Its kind alone: an op writes this last, and nothing while it is there. A fault between the two is not recorded;
        its results are NaN all the same.
        """
        with outside_of_modes():
            record: list[int] = self.tensor.tolist()
        self.kind.value = 0
        return record


ON_CPU = FaultRecord(False)
RECORDS = {"cpu": ON_CPU}


def record_for(tensor: Tensor) -> FaultRecord | None:
    """Returns the record for an op on ``tensor``.

    None where its device cannot write to the memory of the host, and for a tensor without values.
    """
    if type(tensor) is not Tensor:
        return None
    return ON_CPU if tensor.is_cpu else record_on(tensor.device)


def record_on(device: torch.device) -> FaultRecord | None:
    """Returns the record for ops on a device of the kind of ``device``; None where they cannot write to it."""
    record = RECORDS.get(device.type)
    if record is None:
        if device.type != "cuda" or torch.compiler.is_compiling():
            return None
        ops.log_cuda_kernels(device)
        record = RECORDS["cuda"] = FaultRecord(True)
    return record
