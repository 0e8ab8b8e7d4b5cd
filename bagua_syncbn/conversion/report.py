"""What conversion does with a model, as data and to be read."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from .findings import Action, Filter, Finding, examine


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`conversion_report` returns: its text is a summary, and a line for each layer."""

    layers: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join([summary(self.layers), *map(str, self.layers)])


def summary(layers: Iterable[Finding]) -> str:
    """Returns how many layers are converted, skipped and refused."""
    counts = Counter(layer.action for layer in layers)
    actions: tuple[Action, ...] = ("converted", "skipped", "refused")
    return ", ".join(f"{counts[action]} {action}" for action in actions)


def conversion_report(module: nn.Module, *, filter: Filter | None = None) -> ConversionReport:
    """Tells what :func:`convert_sync_batchnorm` does with ``module``, without doing it.

    There is a line for each batch normalization layer; for each module that is refused as a whole, such as a wrapped
    one, instead of what is in it; and for each that stays as it is and might be taken for batch normalization.

    Args:
        module: the model, converted or not.
        filter: as for :func:`convert_sync_batchnorm`.

    Raises:
        TypeError: ``module`` is no module, or ``filter`` is not callable.

    Example::

        >>> print(bagua_syncbn.conversion_report(model))
        2 converted, 1 skipped, 0 refused
        converted  backbone.bn, neck.bn  BatchNorm2d: becomes SyncBatchNorm2d
        converted  head.1  BatchNormAct2d: becomes SyncBatchNormAct2d
        skipped    head.3  InstanceNorm2d: not batch normalization: it normalizes each sample by itself
    """
    return ConversionReport(tuple(examine(module, filter)))
