"""Layers one by one: each on the inputs that it meets on the ranks, against itself in one process on all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checks import is_distributed
from ..communicators import LOCAL, spec_of
from ..conversion import conversion_report
from ..conversion.findings import Finding
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals import pytree
from .comparison import Pair, differences
from .ranks import Ranks, in_float64, joined, share_of
from .steps import digest


class LayerChecks:
    """Checks of the batch normalization layers of a model, made in its forward passes in training."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._findings = [finding for finding in conversion_report(model).layers if finding.module is not model]
        if isinstance(model, _BatchNorm):
            self._findings = list(conversion_report(model).layers)
        self._at_work = False
        self.compared = 0
        self.left_out: list[str] = []
        """Layers that were not compared, and why not."""
        self.differ: dict[str, str] = {}
        """Layers that differ, by name, and what differs."""
        self.unlike: list[str] = []
        """Parameters and buffers of layers that differ between ranks before the step."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which each call of a layer is checked before it is made."""
        handles = [
            finding.module.register_forward_pre_hook(partial(self._check, finding), with_kwargs=True)
            for finding in self._findings
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check(self, finding: Finding, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = finding.names[0]
        if self._at_work or not layer.training or name in self.differ:
            return
        told = f"{type(layer).__name__} {name!r}"
        reason = _why_not_compared(layer, (args, kwargs))
        if reason is not None:
            self.left_out.append(f"{told} was not compared: {reason}")
            return
        self._at_work = True
        try:
            found = self._compare(told, layer, (args, kwargs))
        finally:
            self._at_work = False
        self.compared += 1
        if found is not None:
            self.differ[name] = f"{told} is not as in one process on the inputs that it meets: {found}; {_how(finding)}"

    def _compare(self, told: str, layer: nn.Module, given: Any) -> str | None:
        """Returns what differs between a step of ``layer`` on the ranks and one of it alone on all inputs."""
        ranks = self._ranks
        inputs, states = zip(*ranks.together(f"the input of {told}", lambda: (given, _state_of(layer))), strict=True)
        sizes = [_first_tensor(own).shape for own in inputs]
        state = states[0]
        for name in state:
            if any(digest(own[name]) != digest(state[name]) for own in states):
                self.unlike.append(f"{name} of {told} differs between ranks before the step")
        alone = _Forward(layer, in_float64(joined(inputs, f"input of {told}"), given), state, is_alone=True)
        forwards: list[_Forward] = []

        def forward() -> torch.Size:
            forwards.append(_Forward(layer, in_float64(given, given), state))
            return forwards[0].output.shape

        shapes = ranks.together(f"the forward of {told}", forward)
        own, expected = forwards[0], alone.output
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        alone.backward(grad)
        own_grad, own_output = share_of(grad, shapes, ranks.rank), share_of(expected, shapes, ranks.rank)
        if own_grad is None or own_output is None:
            return f"output has sizes {shapes} on the ranks, {list(expected.shape)} in one process"
        own.backward(own_grad)
        pairs = [Pair("output", "", own.output, own_output)]
        if own.input.grad is not None and alone.input.grad is not None:
            share = share_of(alone.input.grad, sizes, ranks.rank)
            pairs.append(Pair("gradient of the input", "", own.input.grad, share))  # type: ignore[arg-type]
        for name, parameter in own.parameters.items():
            if parameter.grad is not None:
                total = ranks.add_up(parameter.grad)
                pairs.append(Pair("gradient", name, total, alone.parameters[name].grad))  # type: ignore[arg-type]
        pairs += [Pair("buffer", name, own.buffers[name], alone.buffers[name]) for name in own.buffers]
        found = ranks.together(f"the comparison of {told}", lambda: differences(pairs, ranks.rank))
        first = min(
            (difference for own in found for difference in own), default=None, key=lambda it: (it.position, -it.size)
        )
        return None if first is None else first.text


class _Forward:
    """A forward pass of a layer in float64, on copies of its tensors, after which the layer is as before."""

    def __init__(self, layer: nn.Module, given: Any, state: dict[str, Tensor], is_alone: bool = False) -> None:
        args, kwargs = given
        self.input = _first_tensor(given).requires_grad_()
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        before = [(part, dict(vars(part))) for part in layer.modules()]
        try:
            for prefix, part in layer.named_modules():
                own = vars(part)
                for kind, found in (("_parameters", self.parameters), ("_buffers", self.buffers)):
                    own[kind] = dict(own[kind])
                    for name, tensor in own[kind].items():
                        if tensor is not None:
                            whole_name = f"{prefix}.{name}".lstrip(".")
                            copied = in_float64(state[whole_name], tensor)
                            own[kind][name] = found[whole_name] = copied.requires_grad_(tensor.requires_grad)
                own.pop("_cached_call", None)
                if is_alone and isinstance(part, SyncBatchNorm):
                    own["_group_spec"] = spec_of(LOCAL)
            forward = layer.forward
            if is_alone and isinstance(layer, nn.SyncBatchNorm):
                forward = partial(_BatchNorm.forward, layer)
            with torch.inference_mode(False), torch.enable_grad():
                self.output: Tensor = forward(*args, **kwargs)
        finally:
            for part, attributes in before:
                vars(part).clear()
                vars(part).update(attributes)

    def backward(self, grad_output: Tensor) -> None:
        if self.output.requires_grad:
            self.output.backward(grad_output.to(self.output))


def _state_of(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _first_tensor(given: Any) -> Tensor:
    found: Tensor = next(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
    return found


def _why_not_compared(layer: nn.Module, given: Any) -> str | None:
    if getattr(layer, "_masking", None) is not None or getattr(layer, "_accumulator", None) is not None:
        return "it is within masked or accumulate_statistics"
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    if not tensors:
        return "it was called with no tensor"
    if any(map(is_distributed, (*tensors, *_state_of(layer).values()))):
        return "it has or was given a DTensor"
    return None


def _how(finding: Finding) -> str:
    layer = finding.module
    if isinstance(layer, SyncBatchNorm):
        return f"it synchronizes with process_group={layer._group_spec!r}"
    return "it is not converted" if finding.action == "converted" else finding.reason
