"""Report on conversion of a model, as data and as text."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from ..models import Filter, is_data_parallel, is_left_out, modules_with_names
from ..sync_batchnorm import SyncBatchNorm
from .converters import is_candidate
from .findings import Action, Finding, examine
from .hooks import report_notes


@dataclass(frozen=True)
class ConversionReport:
    """Result of :func:`conversion_report`. As text it is a summary and a line for each layer."""

    layers: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join([summary(self.layers), *map(str, self.layers)])


def summary(layers: Collection[Finding]) -> str:
    """Returns how many layers are converted, skipped and refused."""
    if not layers:
        return "no batch normalization layers"
    counts = Counter(layer.action for layer in layers)
    actions: tuple[Action, ...] = ("converted", "skipped", "refused")
    return ", ".join(f"{counts[action]} {action}" for action in actions)


def conversion_report(module: nn.Module, *, filter: Filter | None = None) -> ConversionReport:
    """Reports what :func:`convert_sync_batchnorm` does with ``module``, without doing it.

    The report has a line for each batch normalization layer; for each module that is refused with all its children,
    such as a TorchScript one; and for each skipped module that resembles batch normalization. The line of a
    synchronized layer also says what :func:`fuse_activations`, :func:`recompute_outputs` and :func:`freeze_statistics`
    have done. Within a data parallel model, layers that are not synchronized are refused: they can no longer be.

    Args:
        module: the model, converted or not, wrapped or not.
        filter: as for :func:`convert_sync_batchnorm`.

    Returns:
        The report: as text a summary and a line for each layer, as data ``layers``, a tuple of records with the
        ``names``, ``module``, ``action`` (``"converted"``, ``"skipped"`` or ``"refused"``) and ``reason`` of each.

    Raises:
        TypeError: ``module`` is no module, or ``filter`` is not callable.

    Example::

        >>> print(bagua_syncbn.conversion_report(model))
        2 converted, 1 skipped, 0 refused
        converted  backbone.bn, neck.bn  BatchNorm2d: becomes SyncBatchNorm2d
        converted  head.1  BatchNormAct2d: becomes SyncBatchNormAct2d
        skipped    head.3  InstanceNorm2d: not batch normalization: it normalizes each sample by itself
    """
    findings: list[Finding] = []
    for finding in examine(module, filter):
        findings += _within(finding, filter) if is_data_parallel(finding.module) else [finding]
    notes = _notes(module)
    reasons = ["; ".join([finding.reason, *notes.get(finding.module, [])]) for finding in findings]
    return ConversionReport(
        tuple(finding._replace(reason=reason) for finding, reason in zip(findings, reasons, strict=True))
    )


def _within(wrapped: Finding, filter: Filter | None) -> Iterator[Finding]:
    """Yields the findings for layers of a data parallel module."""
    for layer, own in modules_with_names(wrapped.module).items():
        names = [f"{outer}.{name}".strip(".") for outer in wrapped.names for name in own]
        if isinstance(layer, SyncBatchNorm):
            yield Finding(names, layer, "converted", "synchronized already", type(layer))
        elif is_candidate(layer) and not is_left_out(layer, names, filter):
            yield Finding(names, layer, "refused", wrapped.reason, error=wrapped.error)


def _notes(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Returns notes on frozen layers, and those that other modules have."""
    notes: dict[nn.Module, list[str]] = {}
    for part in model.modules():
        if isinstance(part, SyncBatchNorm) and part._sync_state.frozen is not None:
            notes[part] = ["statistics frozen"]
    for notes_on in report_notes:
        for layer, note in notes_on(model):
            notes.setdefault(layer, []).append(note)
    return notes
