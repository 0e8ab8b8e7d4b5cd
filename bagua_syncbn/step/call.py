"""A call: what the step needs beside tensors that may have gradients."""

from dataclasses import dataclass

from torch import Tensor, nn

from .. import ops
from ..options import Options
from ..sync import Sync


@dataclass(slots=True)
class Call:
    """A call without the tensors that may have gradients. A checkpoint repeats the call with all of it."""

    options: Options
    buffers: ops.Buffers
    sync: Sync
    layer: nn.Module | None = None
    masking: ops.Masking | None = None
    number: int = 0  # counts the calls of the group
    statistics: ops.MergedStats | None = None  # merged over all ranks, once they are gathered


def follow(output: Tensor, residual: Tensor | None, options: Options, masking: ops.Masking | None = None) -> Tensor:
    """Returns ``output`` with residual, activation and mask applied, in operations of torch."""
    if residual is not None:
        residual = residual if masking is None else masking.clear_outputs(residual)
        output = output + residual.to(output.dtype)
    if options.activation is not None:
        output = options.activation.of(output)
    return output if masking is None else masking.clear_outputs(output)
