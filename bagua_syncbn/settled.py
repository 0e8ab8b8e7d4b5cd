"""What a layer has found out in a call, so that the next one like it need not ask again."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import ops
from .autograd import Line, is_plain, line_of, plain_batch_norm

if TYPE_CHECKING:
    from .sync_batchnorm import SyncBatchNorm


_Facts = tuple[object, ...]


class Settled:
    """A plain training call of a layer over several ranks, which has gone through all checks.

    Another call of which the same facts hold would go through them too, and be computed in the same way.
    """

    __slots__ = ("_facts", "_line", "_options")

    def __init__(self, facts: _Facts, options: ops.MergeOptions, line: Line) -> None:
        self._facts, self._options, self._line = facts, options, line

    def step(self, layer: "SyncBatchNorm", input: Tensor) -> Tensor | None:
        """Returns the output of ``layer`` in training; None where the call may be another one.

        Not asked where torch.compile traces.
        """
        line = self._line
        if layer._peers.found() is not line.communicator or _facts_of(layer, input) != self._facts or not is_plain():
            return None
        parameters = layer._parameters
        return plain_batch_norm(input, parameters["weight"], parameters["bias"], self._options, line, layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy finds out for itself


def settle(layer: "SyncBatchNorm", input: Tensor) -> None:
    """Has ``layer`` remember the training call that it has just made, if that was a plain one over several ranks."""
    communicator = layer._peers.found()
    if communicator is None or communicator.size == 1 or not is_plain():
        return
    facts = _facts_of(layer, input)
    if facts is not None:
        options = _options_of(layer)
        vars(layer)["_settled"] = Settled(facts, options, line_of(layer, input, options, communicator))


def _options_of(layer: "SyncBatchNorm") -> ops.MergeOptions:
    buffers = layer._buffers
    mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    if mean is None or not layer.track_running_stats:
        mean = var = batches = None
    return ops.MergeOptions(mean, var, batches, layer.momentum, layer.eps, layer.eps_mode, layer.skip_nonfinite)


def _facts_of(layer: "SyncBatchNorm", input: Tensor) -> _Facts | None:
    """Returns all that the checks look at and that decides who computes, but for the ranks; None for no plain call."""
    if type(input) is not Tensor or layer.fused_activation is not None or layer.is_followed:
        return None
    if not (layer._kept is layer._masking is layer._replica is None) or "_is_replica" in vars(layer):
        return None
    parameters, buffers = layer._parameters, layer._buffers
    try:
        weight, bias = parameters["weight"], parameters["bias"]
        mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    except KeyError:  # as of a parametrized layer
        return None
    return (
        (type(layer), layer.track_running_stats, layer.momentum, layer.eps, layer.eps_mode, layer.skip_nonfinite),
        (layer.place_in_model, layer.name_in_model, input.dtype, input.device, input.size(1)),
        (id(mean), id(var), id(batches)),  # which the options hold
        mean is None or (mean.dtype, mean.device, mean.shape),
        var is None or (var.dtype, var.device, var.shape),
        batches is None or (batches.dtype, batches.device, batches.shape),
        weight is None or (weight.dtype, weight.device, weight.shape),
        bias is None or (bias.dtype, bias.device, bias.shape),
    )
