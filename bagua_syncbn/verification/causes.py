"""Likely causes of a difference between ranks and one process."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._names import name_of
from ..sync_batchnorm import SyncBatchNorm
from .ranks import digest
from .steps import Comparison, Step, differences, tensor_kind, tensors_in


def causes_of(difference: str, found: Comparison, actual: Step, expected: Step) -> Iterator[str]:
    """Yields the likely causes of the ``difference`` between a step on the ranks and in one process."""
    yield from _unsynchronized(found, actual)
    ranks = found.ranks

    def is_equal(weight: float) -> bool:
        return not any(ranks.gather(any(differences(found.combined(found.run(weight)), expected).values())))

    sizes = {tensor.size(0) for tensor in tensors_in(found.batch) if tensor.dim()}
    counts = ranks.gather(sizes.pop() if len(sizes) == 1 else 0)
    loss_is = "statistics match, gradients do not: the loss is a"
    if is_equal(ranks.size):
        yield f"{loss_is} sum over samples; multiply it by the number of ranks, or sum gradients instead of averaging"
    elif sum(counts) and is_equal(counts[ranks.rank] * ranks.size / sum(counts)):
        numbers = ", ".join(map(str, counts))
        yield f"{loss_is} mean over different numbers of samples ({numbers}); use mean_over_ranks"
    elif tensor_kind(difference) == "loss":
        yield (
            "outputs are equal, so statistics match, but the loss is not the average of the ranks' losses; for a "
            "mean over boxes or pixels, use mean_over_ranks"
        )


def _unsynchronized(found: Comparison, actual: Step) -> Iterator[str]:
    """Yields notes on modules with buffers that differ between ranks, and on unconverted layers."""
    buffers = {name: digest(tensor) for name, tensor in actual.items() if tensor_kind(name) == "buffer"}
    differing = found.ranks.differing(buffers)
    for name, module in found.model.named_modules():
        path = f"buffer {name}." if name else "buffer "
        unlike = [buffer for buffer in module._buffers if path + buffer in differing]
        is_unsynchronized = isinstance(module, _BatchNorm) and not isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm))
        if unlike or (is_unsynchronized and module.training):
            differ = f"; {', '.join(unlike)} differ between ranks after the step" if unlike else ""
            yield f"{name_of(module, name)} {_how_synchronized(module)}{differ}"


def _how_synchronized(module: nn.Module) -> str:
    if isinstance(module, SyncBatchNorm):
        return (
            f"synchronizes with process_group={module._sync_state.group!r} in its forward; to use its tensors outside, "
            "call bagua_syncbn.sync_batch_norm(..., process_group=layer.process_group, layer=layer)"
        )
    if isinstance(module, _BatchNorm):
        return "is not converted"
    return "is not converted (if it is batch normalization, call register_converter for its class)"
