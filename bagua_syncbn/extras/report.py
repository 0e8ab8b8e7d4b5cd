"""Questions about the groups of synchronized layers: do their ranks agree, and what is this rank doing in each."""

import torch

from ..agreement.faults import RECORDS
from ..agreement.history import CallHistory, histories


def check_ranks() -> None:
    """Waits for the devices, and raises if ranks made different calls without an error so far.

    In eager mode on CPU they raise at once. On other devices no host waits: where ranks differ the output or gradient
    is NaN, running statistics stay as they are, and the first call that finds out raises. This one finds out for
    certain, for example at the end of an epoch. So it does for compiled calls on CPU; those on other devices give NaN
    and are not named.

    Raises:
        RuntimeError: ranks made different calls. It names them.

    Example::

        >>> bagua_syncbn.check_ranks()
    """
    for device_type in {device_type for _, device_type in list(RECORDS)} - {"cpu"}:
        synchronize = getattr(getattr(torch, device_type, None), "synchronize", None)
        if synchronize is not None:
            synchronize()
    for record in list(RECORDS.values()):
        if record.is_on_cpu or not record.is_told:
            record.raise_if_found()


def groups_report() -> str:
    """Returns what this rank does in each group of synchronized layers, as text for people.

    For each group: the number of calls so far, forward and backward passes counted one by one; the last of them; the
    call that this rank has begun and not ended; the call that all ranks expect next, from those so far; and the call
    that failed. The texts of two ranks show which layer one waits in and where the other is. On CUDA the host does not
    wait: its calls are ahead of those of the device.

    It sends nothing and waits for nothing, so it may be called in any thread. In a job that goes on, facts are read one
    after another; in one that hangs they belong together. Compiled calls are not counted.

    Example::

        >>> print(bagua_syncbn.groups_report())
        rank 0 of 2: 8 calls
            last: backward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1)
            begun: forward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1)
            expected next: forward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1)
    """
    return "\n".join(map(_report, histories())) or "no calls of synchronized layers over several ranks"


def _report(history: CallHistory) -> str:
    calls = {"last": history.last, "begun": history.sending, "expected next": history.expected()}
    facts = [f"{name}: {call.text}" for name, call in calls.items() if call is not None]
    failure = history.failure
    facts += [] if failure is None else [f"failed in: {failure}"]
    return "\n    ".join([f"rank {history.rank} of {history.size}: {history.calls} calls", *facts])
