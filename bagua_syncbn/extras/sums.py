"""Sums over ranks that belong to no layer."""

import torch
from torch import Tensor, nn

from .. import ops
from ..agreement.faults import differ_text, record_of
from ..agreement.history import history_in
from ..agreement.protocol import Agreement, RankExchange
from ..agreement.signatures import CallSignature, checksum, exact_bits, word_of
from ..groups import Communicator


def sum_over_ranks(
    packed: Tensor, communicator: Communicator, what: str, module: nn.Module | None, details: str
) -> Tensor:
    """Returns the sum of ``packed`` (n), in float64, over the ranks of ``communicator``: the same bits on all of them.

    It belongs to no layer. Ranks compare and name this message like the messages of layers. In compiled code the sum is
    NaN where they differ.

    Args:
        packed: on the device of this rank's messages.
        communicator: the ranks, which all make the call.
        what: what it is for, and ``module``, for which model, if any: what errors call it.
        details: what else must be the same on all ranks.

    Raises:
        RuntimeError: the ranks make other calls, or with other models or details; or the collective failed.
    """
    if communicator.size == 1:
        return packed
    size, counted = communicator.size, torch.cat([packed, packed.new_ones(1)])
    if torch.compiler.is_compiling():  # compared on the device alone, as sums of compiled layers are
        words = ops.parts_of(checksum(word_of(f"{what} ({details})"), 0, 0) & exact_bits(size))
        total = communicator.all_reduce(torch.cat([counted, packed.new_tensor(words)]))
        return total[: packed.numel()].where((total[-ops.PARTS :] == total.new_tensor(words) * size).all(), torch.nan)
    history = history_in(communicator)
    if module is not None:
        what = f"{what} of {type(module).__name__}"
        number = history.number_of(module, what)
        what = f"{what} #{number}" if number > 1 else what
    kind, text, numel = word_of(what), f"{what} ({details})", counted.numel() + ops.PARTS
    signature = CallSignature((kind, word_of(text)), kind, text, (True, numel, torch.float64), False)
    record = record_of(history.name, packed.device.type) if type(packed) is Tensor else None
    total = RankExchange(Agreement(signature, record, communicator, history, exact_bits(size))).total(counted)
    total, ranks = total.tensor_split([-1])
    if ranks.item() != size:  # where nothing waited for the comparison of headers, as on CUDA
        raise RuntimeError(differ_text(what))
    return total
