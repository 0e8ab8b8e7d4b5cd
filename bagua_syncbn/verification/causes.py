"""Causes of a difference between ranks and one process: a table, each with a test of its own."""

from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checks import is_distributed
from ..conversion import conversion_report
from ..conversion.findings import Finding
from ..extras.accumulation import accumulation_of
from ..extras.masks import is_masked
from ..extras.unchanged import digest
from ..names import name_of
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.modules import pytree
from .ranks import Peers, in_float64, joined, tensors_in
from .steps import (
    Comparison,
    Loss,
    copied_layer,
    first_difference,
    kind_of,
    loss_of,
    run_alone,
    telling_peers,
    tensors_of,
    with_values,
)


def _randomness(found: Comparison) -> list[str]:
    """Dropout, stochastic depth: a second step in one process gives another result."""
    again, expected = found.step_alone().tensors, found.expected.tensors
    both = {name: (own, expected[name]) for name, own in again.items() if name.startswith(("output", "loss"))}
    if first_difference(found.ranks, both) is None:
        return []
    of_ranks = found.ranks.together("the third step", lambda: _random_modules(found))
    notes = [f"{name} is random: it gives another output for the same input" for own in of_ranks for name in own]
    return list(dict.fromkeys(notes)) or ["the step is random: a second one in one process gives another result"]


def _layers(found: Comparison) -> list[str]:
    """Batch normalization layers that are not synchronized, or with other ranks; modules that compute without one."""
    checks, model = LayerChecks(found.ranks), found.copy()
    with suppress(Exception):  # a layer that cannot be compared raises on all ranks
        checks.run(model, in_float64(found.batch, found.batch), found.loss)
    return [*checks.differ.values(), *_outside_layers(found, model, checks.differ)]


def _weights(found: Comparison) -> list[str]:
    """A loss that is a sum over samples, or a mean over samples where ranks have different numbers of them."""
    ranks, sizes = found.ranks, {tensor.size(0) for tensor in tensors_in(found.batch) if tensor.dim()}
    counts: list[Any] = ranks.together("the sizes of batches", lambda: sizes.pop() if len(sizes) == 1 else None)
    equal = "the statistics are right, the loss is not: the ranks' gradients equal one process if each rank's loss"
    notes = {
        f"{equal}, a sum over its samples, is multiplied by the number of ranks, or gradients are added up": ranks.size
        * 1.0
    }
    if None not in counts and sum(counts):
        weighted = f"{equal} is weighted by its samples ({', '.join(map(str, counts))}): use mean_over_ranks"
        notes[weighted] = counts[ranks.rank] * ranks.size / sum(counts)
    return [note for note, weight in notes.items() if found.difference(found.step(weight)) is None]


_IN_FORWARD = (
    ", in its own forward alone; call it with all its channels, or compute with "
    "bagua_syncbn.sync_batch_norm(..., process_group=layer.process_group, layer=layer)"
)

CAUSES = (_randomness, _layers, _weights)


def _random_modules(found: Comparison) -> list[str]:
    """Returns the modules without children that give another output in a second call with the same input."""
    random: list[str] = []
    model = found.copy()
    names = {module: name_of(module, name) for name, module in model.named_modules() if not list(module.children())}

    def call_again(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        again = tensors_in(module.forward(*args, **kwargs))
        if names[module] not in random and not all(map(torch.equal, tensors_in(output), again)):
            random.append(names[module])

    for module in names:
        module.register_forward_hook(call_again, with_kwargs=True)
    run_alone(model, found.whole, found.loss)
    return random


def _outside_layers(found: Comparison, model: nn.Module, known: Container[nn.Module]) -> Iterator[str]:
    """Yields notes on modules of ``model``, except ``known`` ones, with statistics that no layer has synchronized.

    Buffers of these modules differ between ranks after the step. A layer without buffers was not called, but has
    gradients. A layer that the step does not use at all has neither.
    """
    step = found.actual
    digests = {name: digest(own) for name, own in step.tensors.items() if kind_of(name) == "buffer"}
    of_ranks = found.ranks.together("the buffers", lambda: (digests, step.called, step.unused))
    called, unused = ({name for own in of_ranks for name in own[index]} for index in (1, 2))
    trained = {name for name in step.tensors if kind_of(name) == "gradient"} - {f"gradient {name}" for name in unused}
    findings = {finding.module: finding for finding in conversion_report(model).layers}
    for name, module in model.named_modules():
        path, where, how = f"{name}." if name else "", name_of(module, name), _how(module, findings.get(module))
        names = [own for own in module._buffers if len({of.get(f"buffer {path}{own}") for of, *_ in of_ranks}) > 1]
        unlike = ", ".join(names)
        note = unlike and f"{unlike} of {where} differ between ranks after the step"
        if isinstance(module, SyncBatchNorm):
            how += _IN_FORWARD
            if name not in called:
                used = unlike and f"its {unlike} differ between ranks"
                if module.running_mean is None and trained & {f"gradient {path}{own}" for own in module._parameters}:
                    used = "its parameters have gradients"
                note = used and f"{where} was not called in the step, but {used}"
        if note and module not in known:
            yield f"{note}: {how}"


class LayerChecks:
    """Comparisons of batch normalization layers one by one, on the inputs that they get in a forward pass."""

    def __init__(self, ranks: Peers) -> None:
        self._ranks = ranks
        self.compared = 0
        self.differ: dict[nn.Module, str] = {}
        """Description of each layer that differs."""
        self.unlike: dict[str, None] = {}
        """Parameters and buffers of layers that differ between ranks before the step."""

    def run(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        """Runs ``model``, and compares each training call of a layer before it is made."""
        findings = {finding.module: finding for finding in conversion_report(model).layers}
        with ExitStack() as hooks:
            for name, layer in model.named_modules():
                finding = findings.get(layer)
                if isinstance(layer, _BatchNorm) or (finding is not None and finding.action == "skipped"):
                    check = partial(self._check, name_of(layer, name), _how(layer, finding))
                    hooks.callback(layer.register_forward_pre_hook(check, with_kwargs=True).remove)

            def forward() -> None:
                with torch.no_grad(), telling_peers(model):
                    loss_of(model, batch, loss)

            self._ranks.each("the forward pass", forward)

    def _check(self, name: str, how: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if layer.training and layer not in self.differ:
            compared = self._compared(name, layer, args, kwargs)
            difference = compared.difference(compared.actual)
            self.compared += 1
            if difference is not None:
                self.differ[layer] = f"{name} differs from one process on the same inputs: {difference}; {how}"

    def _compared(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> Comparison:
        ranks, tensors = self._ranks, tensors_of(layer)
        _check_comparable(name, layer, [*tensors_in((args, kwargs)), *tensors.values()])
        values, *others = ranks.together(f"the input of {name}", lambda: tensors)
        for own in values:
            if any(digest(of_rank[own]) != digest(values[own]) for of_rank in others):
                self.unlike[f"{own} of {name} differs between ranks before the step"] = None
        is_plain = type(layer).forward in (SyncBatchNorm.forward, _BatchNorm.forward, nn.SyncBatchNorm.forward)
        if is_plain and not kwargs and len(args) == 1 and args[0].dim() > 2:
            # (N, C, *) as (N * positions, C, 1, ...): ranks may have images of other sizes.
            input = args[0].movedim(1, -1).flatten(0, -2)
            args = (input[(..., *[None] * (args[0].dim() - 2))],)
        given = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), (args, kwargs)
        )
        merge, copy = partial(joined, name=f"the input of {name}"), lambda: with_values(copied_layer(layer), values)
        return Comparison(ranks, copy, given, _sum_of_sines, merge, f" of {name}", weight=ranks.size)


def _sum_of_sines(layer: nn.Module, given: Any) -> Tensor:
    """A loss whose gradient differs from value to value, and that adds up over ranks whatever their sizes."""
    args, kwargs = given
    return torch.stack([(output + 1).sin().sum() for output in tensors_in(layer(*args, **kwargs))]).sum()


def _check_comparable(name: str, layer: nn.Module, tensors: list[Tensor]) -> None:
    """Raises ValueError if ``layer`` cannot be compared by itself."""
    got = None
    if isinstance(layer, SyncBatchNorm) and (is_masked(layer) or accumulation_of(layer) is not None):
        got = "within masked or accumulate_statistics"
    elif any(map(is_distributed, tensors)):
        got = "with a DTensor"
    if got is not None:
        raise ValueError(f"model: expected layers that can be compared one by one, got {name} {got}")


def _how(layer: nn.Module, finding: Finding | None) -> str:
    """Returns how ``layer`` synchronizes."""
    if isinstance(layer, SyncBatchNorm):
        return f"it synchronizes with process_group={layer._group_spec!r}"
    if finding is None and not isinstance(layer, _BatchNorm):
        return (
            "it is not converted; if it is batch normalization, register_converter a class for it, or have its forward "
            "compute with bagua_syncbn.sync_batch_norm(..., layer=self)"
        )
    return "it is not converted" if finding is None or finding.action == "converted" else finding.reason
