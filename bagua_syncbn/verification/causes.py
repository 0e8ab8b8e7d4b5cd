"""Causes of a difference between ranks and one process, each found by its own test."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checks import is_distributed
from ..conversion import conversion_report
from ..conversion.findings import Finding
from ..dry_run import digest
from ..masked import is_masked
from ..names import name_of
from ..running_statistics.accumulation import accumulation_of
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
    notifying_peers,
    run_alone,
    tensors_of,
    with_values,
)


def _randomness(found: Comparison) -> list[str]:
    """Dropout, stochastic depth: a second step in one process has a different result."""
    second, first = found.step_alone().tensors, found.expected.tensors
    pairs = {name: (own, first[name]) for name, own in second.items() if kind_of(name) in ("output", "loss")}
    if first_difference(found.ranks, pairs) is None:
        return []
    by_rank = found.ranks.gather("the third step", lambda: _random_modules(found))
    notes = [f"{name} is random: its output differs for the same input" for names in by_rank for name in names]
    return list(dict.fromkeys(notes)) or ["the step is random: a second step in one process has a different result"]


def _random_modules(found: Comparison) -> list[str]:
    """Returns the modules without children whose output differs in a second call with the same input."""
    random: list[str] = []
    model = found.copy()

    def call_again(where: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        again = tensors_in(module.forward(*args, **kwargs))
        if where not in random and not all(map(torch.equal, tensors_in(output), again)):
            random.append(where)

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(partial(call_again, name_of(module, name)), with_kwargs=True)
    run_alone(model, found.whole, found.loss)
    return random


def _layers(found: Comparison) -> list[str]:
    """Layers that are not synchronized or synchronize with different ranks, and statistics computed outside layers."""
    layers, model = Layers(found.ranks), found.copy()
    with suppress(Exception):  # a layer that cannot be compared raises on all ranks
        layers.compare(model, in_float64(found.batch, found.batch), found.loss)
    return [*layers.differ.values(), *_outside_layers(found, model, layers)]


def _outside_layers(found: Comparison, model: nn.Module, layers: "Layers") -> Iterator[str]:
    """Yields notes on modules with statistics that no layer has synchronized.

    Their buffers differ between ranks after the step. A layer without buffers was not called, but has gradients.
    """
    step = found.actual
    digests = {name: digest(own) for name, own in step.tensors.items() if kind_of(name) == "buffer"}
    by_rank = found.ranks.gather("the buffers", lambda: (digests, step.called, {*step.unused}))
    called, unused = ({name for own in by_rank for name in own[index]} for index in (1, 2))
    for name, module in model.named_modules():
        path, where = f"{name}." if name else "", name_of(module, name)
        unlike = [own for own in module._buffers if len({of.get(f"buffer {path}{own}") for of, *_ in by_rank}) > 1]
        trained = {
            f"{path}{own}" for own, tensor in module._parameters.items() if tensor is not None and tensor.requires_grad
        }
        note = f"{', '.join(unlike)} of {where} differ between ranks after the step" if unlike else ""
        how = layers.how(module)
        if isinstance(module, SyncBatchNorm):
            how += (
                ", but only in its own forward; call it with all its channels, or use "
                "bagua_syncbn.sync_batch_norm(..., process_group=layer.process_group, layer=layer)"
            )
            if name not in called and (unlike or trained - unused):
                used = f"its {', '.join(unlike)} differ between ranks" if unlike else "its parameters have gradients"
                note = f"{where} was not called in the step, but {used}"
        if note and module not in layers.differ:
            yield f"{note}: {how}"


def _weights(found: Comparison) -> list[str]:
    """A loss that is a sum over samples, or a mean over samples although ranks have different numbers of them."""
    ranks, sizes = found.ranks, {tensor.size(0) for tensor in tensors_in(found.batch) if tensor.dim()}
    counts: list[Any] = ranks.gather("the sizes of batches", lambda: sizes.pop() if len(sizes) == 1 else None)
    notes = {"the loss is a sum over samples; multiply it by the number of ranks, or sum gradients": float(ranks.size)}
    if None not in counts and sum(counts):
        weighted = (
            f"the loss is a mean over different numbers of samples ({', '.join(map(str, counts))}); use mean_over_ranks"
        )
        notes[weighted] = counts[ranks.rank] * ranks.size / sum(counts)
    return [f"statistics match, gradients do not: {note}" for note, weight in notes.items() if found.is_equal(weight)]


CAUSES = (_randomness, _layers, _weights)


class Layers:
    """Compares batch normalization layers one by one, on their inputs in a forward pass."""

    def __init__(self, ranks: Peers) -> None:
        self._ranks = ranks
        self._findings: dict[nn.Module, Finding] = {}
        self.compared = 0
        """Number of calls that were compared."""
        self.differ: dict[nn.Module, str] = {}
        """Description of each layer that differs."""
        self.unlike: dict[str, None] = {}
        """Parameters and buffers that differ between ranks before the step."""

    def compare(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        """Runs ``model``, and compares each training call of a layer before the call."""
        self._findings = {finding.module: finding for finding in conversion_report(model).layers}
        with ExitStack() as hooks:
            for name, layer in model.named_modules():
                finding = self._findings.get(layer)
                if isinstance(layer, _BatchNorm) or (finding is not None and finding.action == "skipped"):
                    hook = partial(self._compare, name_of(layer, name))
                    hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)

            def forward() -> None:
                with torch.no_grad(), notifying_peers(model):
                    loss_of(model, batch, loss)

            self._ranks.run("the forward pass", forward)

    def _compare(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if not layer.training or layer in self.differ:
            return
        ranks, tensors = self._ranks, tensors_of(layer)
        _check_comparable(name, layer, [*tensors_in((args, kwargs)), *tensors.values()])
        values, *others = ranks.gather(f"the input of {name}", lambda: tensors)
        for own in values:
            if any(digest(other[own]) != digest(values[own]) for other in others):
                self.unlike[f"{own} of {name} differs between ranks before the step"] = None
        is_plain = type(layer).forward in (SyncBatchNorm.forward, _BatchNorm.forward, nn.SyncBatchNorm.forward)
        if is_plain and not kwargs and len(args) == 1 and args[0].dim() > 2:
            # Ranks may have images of different sizes: (N, C, *) becomes (N * positions, C, 1, ...).
            input = args[0].movedim(1, -1).flatten(0, -2)
            args = (input[(..., *[None] * (args[0].dim() - 2))],)
        given = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), (args, kwargs)
        )
        merge, copy = partial(joined, name=f"the input of {name}"), lambda: with_values(copied_layer(layer), values)
        difference = Comparison(ranks, copy, given, _sum_of_sines, merge, f" of {name}", weight=ranks.size).difference
        self.compared += 1
        if difference is not None:
            how = self.how(layer)
            self.differ[layer] = f"{name} differs from one process on the same inputs: {difference}; {how}"

    def how(self, layer: nn.Module) -> str:
        """Describes how ``layer`` synchronizes."""
        finding = self._findings.get(layer)
        if isinstance(layer, SyncBatchNorm):
            return f"it synchronizes with process_group={layer._sync_state.group!r}"
        if finding is None and not isinstance(layer, _BatchNorm):
            return (
                "it is not converted; if it is batch normalization, call register_converter for its class, or "
                "bagua_syncbn.sync_batch_norm(..., layer=self) in its forward"
            )
        return "it is not converted" if finding is None or finding.action == "converted" else finding.reason


def _sum_of_sines(layer: nn.Module, given: Any) -> Tensor:
    """A loss with a different gradient for each value, and that can be summed over ranks of any batch sizes."""
    args, kwargs = given
    return torch.stack([(output + 1).sin().sum() for output in tensors_in(layer(*args, **kwargs))]).sum()


def _check_comparable(name: str, layer: nn.Module, tensors: list[Tensor]) -> None:
    """Raises ValueError if ``layer`` cannot be compared without its model."""
    got = None
    if isinstance(layer, SyncBatchNorm) and (is_masked(layer) or accumulation_of(layer) is not None):
        got = "inside masked or accumulate_statistics"
    elif any(map(is_distributed, tensors)):
        got = "with a DTensor"
    if got is not None:
        raise ValueError(f"model: expected layers that can be compared one by one, got {name} {got}")
