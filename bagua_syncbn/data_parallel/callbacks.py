"""Callbacks by which the replicas of one model learn of each other, and of the end of each."""

from collections.abc import Sequence

from torch import nn

from ..extras.checkpointing import refuse_to_recompute_replicas
from ..names import name_of
from ..sync_batchnorm import SyncBatchNorm, refuse_alone
from .replicas import CallbackContext, Replicas
from .step import Replica


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Tells the submodules of the replicas of one model about each other.

    Calls ``__data_parallel_replicate__(ctx, copy_id)`` on each submodule, of any class, that has such a method:
    ``copy_id`` is the index of the replica, and ``ctx`` a :class:`CallbackContext` that all copies of the submodule get
    and on which they may set attributes. The submodules of replica 0 are called first. A submodule that has several
    names in the model is called once for each replica.

    Only code that makes its own replicas needs this function. Call it after each replication and before the replicas
    run, each in a thread of its own. The call of a replica is its forward pass.

    Args:
        modules: the replicas, in order. Replica 0 must hold the buffers of the model itself, as with
            :func:`torch.nn.parallel.replicate`: the running statistics are updated there and nowhere else.

    Raises:
        ValueError: ``modules`` is empty, or not all of them have the same submodules.
        RuntimeError: activation checkpointing recomputes replicas that were or are in training.
    """
    structures = [dict(module.named_modules()) for module in modules]
    if not structures or any(structure.keys() != structures[0].keys() for structure in structures):
        raise ValueError(
            "modules: expected replicas of one model, at least one and all with the same submodules, got "
            f"{len(structures)} with {sorted({len(structure) for structure in structures})} submodules"
        )
    layers = [(name, child) for name, child in structures[0].items() if isinstance(child, SyncBatchNorm)]
    if layers:
        name, layer = layers[0]
        refuse_to_recompute_replicas(name_of(layer, name), any(layer.training for _, layer in layers))
    replicas = Replicas(len(modules))
    contexts = {
        name: CallbackContext(replicas, name_of(child, name))
        for name, child in structures[0].items()
        if hasattr(child, "__data_parallel_replicate__")
    }
    for copy_id, structure in enumerate(structures):
        for name, context in contexts.items():
            structure[name].__data_parallel_replicate__(context, copy_id)
    if len(modules) > 1 and layers:
        for rank, module in enumerate(modules):
            replicas.watch(rank, module)


def _replicate(layer: SyncBatchNorm, ctx: CallbackContext, copy_id: int) -> None:
    """Makes this copy of a layer know the copies in other replicas."""
    if not isinstance(ctx, CallbackContext):
        raise TypeError(
            "ctx: expected a bagua_syncbn.data_parallel.CallbackContext, as execute_replication_callbacks makes it, "
            f"got {type(ctx).__module__}.{type(ctx).__name__}"
        )
    others = (one for one in layer._sync_state.attachments if one is not refuse_alone and not isinstance(one, Replica))
    layer._sync_state.attachments = (Replica(ctx.replicas, copy_id, ctx.layer), *others)


SyncBatchNorm.__data_parallel_replicate__ = _replicate  # type: ignore[attr-defined]


def first_error(replica: nn.Module, raised: Exception) -> BaseException:
    """Returns the first error in the replicas that ``replica`` belongs to.

    ``raised`` may be a ReplicaError that followed from it.
    """
    group: Replicas | None = vars(replica).get("_bagua_syncbn_replicas")
    return raised if group is None or group.error is None else group.error
