"""Bagua's ``GradientAllReduceAlgorithm``; without Bagua, a record of its options."""

from typing import TYPE_CHECKING

from .. import has_bagua

if has_bagua and not TYPE_CHECKING:
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
else:

    class GradientAllReduceAlgorithm:
        """Gradients are averaged over the ranks in each step, by :func:`~bagua_syncbn.with_bagua`.

        Args:
            hierarchical: whether to add up within each node first; torch's engine leaves that to the backend.
            average: whether to average gradients, or else to sum them, which torch's engine does not do.
        """

        def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
            self.hierarchical = hierarchical
            self.average = average


# As Bagua's documentation spells it.
GradientAllReduce = GradientAllReduceAlgorithm

__all__ = ["GradientAllReduce", "GradientAllReduceAlgorithm"]
