"""What a layer has found out in a call, so that the next one like it need not ask again."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import ops
from .autograd import guard_of, is_plain, plain_batch_norm, unwrapped
from .sync import CallSite, call_site

if TYPE_CHECKING:
    from .sync_batchnorm import SyncBatchNorm


_Facts = tuple[object, ...]


class Settled:
    """A plain training call of a layer over several ranks, which has gone through all checks.

    Another call of which the same is true would go through them too, and be computed in the same way.
    """

    __slots__ = ("_facts", "_guard", "_options", "_site")

    def __init__(self, facts: _Facts, guard: Callable[..., bool], options: ops.MergeOptions, site: CallSite) -> None:
        self._facts, self._guard, self._options, self._site = facts, guard, options, site

    def step(self, layer: "SyncBatchNorm", input: Tensor) -> Tensor | None:
        """Returns the output of ``layer``; None where the call may be another one.

        Not asked where torch.compile traces.
        """
        site = self._site
        facts, weight, bias, tensors = _look_at(layer, input)
        same = facts == self._facts and layer._peers.found() is site.communicator and is_plain()
        if not same or not self._guard(*tensors):
            return None
        return plain_batch_norm(input, weight, bias, self._options, site, layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy finds out for itself


def settle(layer: "SyncBatchNorm", input: Tensor) -> None:
    """Has ``layer`` remember the call that it has just made, if that was a plain one in training over several ranks."""
    communicator = layer._peers.found() if layer.training else None
    if communicator is None or communicator.size == 1 or type(input) is not Tensor or not is_plain():
        return
    if layer.fused_activation is not None or layer._is_replica:
        return
    facts, _, _, tensors = _look_at(layer, input)
    if not (layer._kept is layer._masking is layer._replica is None) or any(unwrapped(t) is not t for t in tensors):
        return
    guard = guard_of(*tensors) if tensors else None
    if guard is not None:
        options = _options_of(layer)
        vars(layer)["_settled"] = Settled(facts, guard, options, call_site(layer, input, options, communicator))


def _options_of(layer: "SyncBatchNorm") -> ops.MergeOptions:
    buffers = layer._buffers
    mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    if mean is None or not layer.track_running_stats:
        mean = var = batches = None
    return ops.MergeOptions(mean, var, batches, layer.momentum, layer.eps, layer.eps_mode, layer.skip_nonfinite)


# What the checks look at and what decides who computes, but for the ranks, the tensors and the numbers in each layer.
_attributes = attrgetter(
    *("eps_mode", "skip_nonfinite", "converted_model", "name_in_model", "fused_activation"),
    *("_masking", "_kept", "_replica", "_is_replica"),
)


def _look_at(layer: "SyncBatchNorm", input: Tensor) -> tuple[_Facts, Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    """Returns the facts of a call, weight and bias, and all tensors, with ``input`` for those that there are not.

    Nothing of it where not all are known.
    """
    own = layer.__dict__
    parameters, buffers = own["_parameters"], own["_buffers"]
    try:
        weight, bias = parameters["weight"], parameters["bias"]
        mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        numbers = own["training"], own["track_running_stats"], own["momentum"], own["eps"]
    except KeyError:  # as of a parametrized layer
        return (), None, None, ()
    facts = type(layer), numbers, _attributes(layer), id(mean), id(var), id(batches)  # the options hold the buffers
    tensors = (
        input,
        input if weight is None else weight,
        input if bias is None else bias,
        input if mean is None else mean,
        input if var is None else var,
        input if batches is None else batches,
    )
    return facts, weight, bias, tensors
