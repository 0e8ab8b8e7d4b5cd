"""Bagua's ``GradientAllReduceAlgorithm``; without Bagua, a class with the same options."""

from typing import TYPE_CHECKING

from .. import has_bagua

if has_bagua and not TYPE_CHECKING:
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
else:

    class GradientAllReduceAlgorithm:
        """Averages gradients over the ranks in each step, see :func:`~bagua_syncbn.with_bagua`.

        Args:
            hierarchical: whether to sum within each node first; ignored by torch.
            average: whether to average or to sum gradients; torch only averages.
        """

        def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
            self.hierarchical = hierarchical
            self.average = average


# As Bagua's documentation spells it.
GradientAllReduce = GradientAllReduceAlgorithm

__all__ = ["GradientAllReduce", "GradientAllReduceAlgorithm"]
