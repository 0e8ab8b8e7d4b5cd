"""Cached calls: a layer remembers a training call over several ranks that passed all checks, for later ones like it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any

from torch import Tensor

from .. import ops
from ..checks import checked_options
from ..communicators import Communicator
from ..options import ATTRIBUTES, Options
from ..sync import Sync, sync_of
from ..torch_internals import guard_of, has_transforms, is_untouched, level_of_duals, unwrapped
from .call import Call
from .function import cached_batch_norm
from .recomputation import this_thread

_Facts = tuple[object, ...]

# Attributes of a layer, other than its tensors, that decide how a call is computed and named.
_attributes_of = attrgetter(
    "__class__",
    "training",
    "track_running_stats",
    "converted_model",
    "name_in_model",
    "_masking",
    "_accumulator",
    "_replica",
    "_is_replica",
    *ATTRIBUTES,
)


@dataclass(slots=True, eq=False)
class CachedCall:
    """A training call of a layer over several ranks that passed all checks, with all facts that the checks depend on.

    A later call with the same facts passes the checks too, and is computed in the same way.
    """

    facts: _Facts
    given: Sequence[bool]  # which of the tensors are not None
    guard: Callable[..., bool]  # checks the tensors of a call
    communicator: Communicator
    options: Options
    buffers: ops.Buffers
    sync: Sync

    def run(self, layer: Any, input: Tensor) -> Tensor | None:
        """Returns the output of ``layer``; None if the call may differ. Must not run while torch.compile traces."""
        # The guard sees traces and selective checkpoints. It aborts the process if a tensor has no strides: nested
        # tensors, and what vmap makes of them.
        if this_thread.runs or this_thread.depth or level_of_duals() >= 0 or has_transforms():
            return None
        facts, tensors = _look_at(layer, input)
        try:
            same = input.shape and facts == self.facts
        except (RuntimeError, ValueError):  # no shape; an option is a tensor or an array, which checks refuse by name
            return None
        if not same or layer._group_spec.made() is not self.communicator:
            return None
        if not self.guard(*compress(tensors, self.given)):
            return None
        weight, bias = tensors[1:3]
        return cached_batch_norm(input, weight, bias, None, Call(self.options, self.buffers, self.sync, layer))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and files hold None


def remember_call(layer: Any, input: Tensor) -> None:
    """Caches the call that ``layer`` has just made, if it was in training over several ranks."""
    communicator = layer._group_spec.made() if layer.training else None
    if communicator is None or communicator.size == 1 or type(input) is not Tensor:
        return
    if this_thread.runs or this_thread.depth or not is_untouched():
        return
    if layer._has_getattr:  # its tensors may be others than its parameters and buffers
        return
    facts, tensors = _look_at(layer, input)
    is_alone = layer._accumulator is layer._masking is layer._replica is None and not layer._is_replica
    if not facts or not is_alone:
        return
    given = [tensor for tensor in tensors if tensor is not None]
    guard = None if any(unwrapped(tensor) is not tensor for tensor in given) else guard_of(*given)
    if guard is None:
        return
    attributes: Any = facts[0]
    options = checked_options(Options(*attributes[-len(ATTRIBUTES) :]), training=True)
    buffers = ops.NO_BUFFERS
    if layer.track_running_stats and layer.running_mean is not None:
        buffers = ops.Buffers(layer.running_mean, layer.running_var, layer.num_batches_tracked)
    sync = sync_of(layer, input, options, buffers, communicator)
    are_given = [tensor is not None for tensor in tensors]
    vars(layer)["_cached_call"] = CachedCall(facts, are_given, guard, communicator, options, buffers, sync)


def _look_at(layer: Any, input: Tensor) -> tuple[_Facts, Sequence[Tensor | None]]:
    """Returns the facts of a call, and its tensors: input, weight, bias, running mean and variance, counter.

    Both are empty if a parameter or buffer is not where modules have them, as in a parametrized layer.
    """
    own = layer.__dict__
    parameters, buffers = own["_parameters"], own["_buffers"]
    try:
        weight, bias = parameters["weight"], parameters["bias"]
        mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    except KeyError:
        return (), ()
    no_weight, no_bias = weight is None or weight.is_nested, bias is None or bias.is_nested
    # The cached call holds the buffers, so that no other ones can have their ids.
    facts = _attributes_of(layer), no_weight, no_bias, id(mean), id(var), id(batches)
    return facts, (input, weight, bias, mean, var, batches)
