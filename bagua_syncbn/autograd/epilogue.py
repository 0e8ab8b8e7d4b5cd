"""What follows the normalization in a fused call."""

from typing import NamedTuple

from torch import Tensor

from .. import ops


class Epilogue(NamedTuple):
    """``act(bn(x) + residual)``, of which one may be missing."""

    activation: ops.Activation | None
    residual: Tensor | None

    def after(self, output: Tensor) -> Tensor:
        """Returns what becomes of the ``output`` of the normalization, in operations of torch."""
        if self.residual is not None:
            output = output + self.residual.to(output.dtype)
        return output if self.activation is None else self.activation.of(output)
