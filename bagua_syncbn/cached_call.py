"""Cached calls: a layer remembers a training call over several ranks that passed all checks, for later ones like it."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import ops
from .autograd import Call, cached_batch_norm, is_plain
from .checks import checked_options
from .options import Options, attributes_of, options_of
from .sync import CallSite, RankSync, call_site, tell_peers
from .torch_internals import guard_of, unwrapped

if TYPE_CHECKING:
    from .sync_batchnorm import SyncBatchNorm


_Facts = tuple[object, ...]


class CachedCall:
    """A training call of a layer over several ranks that passed all checks, with all facts that the checks depend on.

    A later call with the same facts passes the checks too, and is computed in the same way.
    """

    __slots__ = ("_buffers", "_facts", "_guard", "_options", "_site")

    def __init__(
        self, facts: _Facts, guard: Callable[..., bool], options: Options, buffers: ops.Buffers, site: CallSite
    ) -> None:
        self._facts, self._guard, self._options, self._buffers, self._site = facts, guard, options, buffers, site

    def run(self, layer: "SyncBatchNorm", input: Tensor) -> Tensor | None:
        """Returns the output of ``layer``; None if the call may differ. Must not run while torch.compile traces."""
        site = self._site
        facts, weight, bias, tensors = _look_at(layer, input)
        same = facts == self._facts and layer._group_spec.found() is site.communicator and is_plain()
        if not same or not self._guard(*tensors):
            return None
        try:
            return cached_batch_norm(input, weight, bias, Call(self._options, self._buffers, RankSync(site), layer))
        except RuntimeError as error:
            tell_peers(site.communicator, layer, error)
            ops.raise_torchs(error)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and files hold None


def remember_call(layer: "SyncBatchNorm", input: Tensor) -> None:
    """Caches the call that ``layer`` has just made, if it was in training over several ranks."""
    communicator = layer._group_spec.found() if layer.training else None
    if communicator is None or communicator.size == 1 or type(input) is not Tensor or not is_plain():
        return
    if layer._has_getattr:  # its tensors may be others than its parameters and buffers
        return
    facts, _, _, tensors = _look_at(layer, input)
    is_alone = layer._accumulator is layer._masking is layer._replica is None and not layer._is_replica
    if not facts or not is_alone or any(unwrapped(tensor) is not tensor for tensor in tensors):
        return
    guard = guard_of(*tensors)
    if guard is None:
        return
    options = checked_options(options_of(layer), training=True)
    buffers = ops.NO_BUFFERS
    if layer.track_running_stats and layer.running_mean is not None:
        buffers = ops.Buffers(layer.running_mean, layer.running_var, layer.num_batches_tracked)
    site = call_site(layer, input, options, False, communicator)
    vars(layer)["_cached_call"] = CachedCall(facts, guard, options, buffers, site)


# Attributes, beside options, tensors and ranks, that decide how a call is computed and named.
_others_of = attrgetter("converted_model", "name_in_model", "_masking", "_accumulator", "_replica", "_is_replica")


def _look_at(layer: "SyncBatchNorm", input: Tensor) -> tuple[_Facts, Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    """Returns the facts of a call, weight, bias, and all tensors, with ``input`` in place of missing ones.

    The facts are empty if some are not known.
    """
    own = layer.__dict__
    parameters, buffers = own["_parameters"], own["_buffers"]
    try:
        weight, bias = parameters["weight"], parameters["bias"]
        mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    except KeyError:  # for example in a parametrized layer
        return (), None, None, ()
    modes = own["training"], own["track_running_stats"]
    # The cached call holds the buffers, so that no other ones can have their ids.
    facts = type(layer), modes, attributes_of(layer), _others_of(layer), id(mean), id(var), id(batches)
    tensors = (
        input,
        input if weight is None else weight,
        input if bias is None else bias,
        input if mean is None else mean,
        input if var is None else var,
        input if batches is None else batches,
    )
    return facts, weight, bias, tensors
