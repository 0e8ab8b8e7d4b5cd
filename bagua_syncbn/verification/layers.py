"""Layers one by one: each on the inputs that it meets on the ranks, against itself in one process on all of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from ..unchanged import digest
from .comparison import Pair, first_difference
from .ranks import Ranks, in_float64, joined, share_of, tensors_in
from .steps import called, tensors_of


class LayerChecks:
    """Checks of the batch normalization layers of a model, made in its forward passes in training."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._at_work = False
        self.compared = 0
        self.differ: dict[nn.Module, str] = {}
        """Layers that differ, each with what was found."""
        self.unlike: dict[str, None] = {}
        """Parameters and buffers of layers that differ between ranks before the step."""

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Context in which each call of a layer of ``model`` is checked before it is made."""
        findings = {finding.module: finding for finding in conversion_report(model).layers}
        with ExitStack() as hooks:
            for name, layer in model.named_modules():
                finding = findings.get(layer)
                if isinstance(layer, _BatchNorm) or (finding is not None and finding.action == "skipped"):
                    check = partial(self._check, called(layer, name), _how(layer, finding))
                    hooks.callback(layer.register_forward_pre_hook(check, with_kwargs=True).remove)
            yield

    def _check(self, told: str, how: str, layer: nn.Module, *given: Any) -> None:
        if self._at_work or not layer.training or layer in self.differ:
            return
        self._at_work = True
        try:
            with torch.enable_grad():  # the pass itself may be without gradients
                difference = self._difference(told, layer, given)
        finally:
            self._at_work = False
        self.compared += 1
        if difference is not None:
            self.differ[layer] = f"{told} is not as in one process on the inputs that it meets: {difference}; {how}"

    def _difference(self, told: str, layer: nn.Module, given: Any) -> str | None:
        """Returns what differs between a step of ``layer`` on the ranks and one of it alone on all inputs."""
        ranks = self._ranks
        _check_comparable(told, layer, given)
        inputs, states = zip(*ranks.together(f"the input of {told}", lambda: (given, tensors_of(layer))), strict=True)
        state = states[0]
        for name in state:
            if any(digest(own[name]) != digest(state[name]) for own in states):
                self.unlike[f"{name} of {told} differs between ranks before the step"] = None
        whole: Any
        arrange: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
        if all(_has_positions(layer, *own) for own in inputs):
            arrange = _arranged
            whole = (torch.cat([arrange(own) for (own,), _ in inputs], 2),), {}
        else:
            whole = joined(inputs, f"the input of {told}")
        alone = _Forward(layer, in_float64(whole, given), state, is_alone=True)
        own = ranks.each(f"the forward of {told}", lambda: _Forward(layer, in_float64(given, given), state))
        output = arrange(own.output)
        shapes = ranks.together(f"the output of {told}", lambda: output.shape)
        grad = torch.randn(alone.output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        pairs = [Pair("output", "", output, _share(alone.output, shapes, ranks.rank))]
        if output.requires_grad:
            alone.output.backward(grad.to(alone.output))
            output.backward(_share(grad, shapes, ranks.rank).to(output))
            sizes = [arrange(tensors_in(own)[0]).shape for own in inputs]
            share = _share(alone.gradient, sizes, ranks.rank)
            pairs.append(Pair("gradient of the input", "", arrange(own.gradient), share))
        grads = ranks.together(f"the gradients of {told}", lambda: own.gradients)
        for name, wanted in alone.gradients.items():
            total = torch.stack([of_rank[name] for of_rank in grads]).sum(0)
            pairs.append(Pair("gradient", name, total.to(wanted.device), wanted))
        pairs += [Pair("buffer", name, own.buffers[name], alone.buffers[name]) for name in own.buffers]
        first = first_difference(ranks, pairs)
        return None if first is None else first.text


class _Forward:
    """A forward pass of a layer in float64, on copies of its tensors, after which the layer is as before."""

    def __init__(self, layer: nn.Module, given: Any, state: dict[str, Tensor], is_alone: bool = False) -> None:
        args, kwargs = given
        self._input = tensors_in(given)[0].requires_grad_()
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
                            full_name = f"{prefix}.{name}".lstrip(".")
                            copied = in_float64(state[full_name], tensor).requires_grad_(tensor.requires_grad)
                            own[kind][name] = found[full_name] = copied
                own.pop("_cached_call", None)
                if is_alone and isinstance(part, SyncBatchNorm):
                    own["_group_spec"] = spec_of(LOCAL)
            forward = layer.forward
            if is_alone and isinstance(layer, nn.SyncBatchNorm):
                forward = partial(_BatchNorm.forward, layer)
            self.output: Tensor = forward(*args, **kwargs)
        finally:
            for part, attributes in before:
                vars(part).clear()
                vars(part).update(attributes)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the parameters that have one."""
        return {name: own.grad for name, own in self.parameters.items() if own.grad is not None}

    @property
    def gradient(self) -> Tensor:
        """The gradient of the input."""
        return torch.zeros_like(self._input) if self._input.grad is None else self._input.grad


def _check_comparable(told: str, layer: nn.Module, given: Any) -> None:
    """Raises ValueError if ``layer`` cannot be compared by itself."""
    got = None
    if getattr(layer, "_masking", None) is not None or getattr(layer, "_accumulator", None) is not None:
        got = "within masked or accumulate_statistics"
    elif not tensors_in(given) or any(map(is_distributed, (*tensors_in(given), *tensors_of(layer).values()))):
        got = "with a DTensor, or none"
    if got is not None:
        raise ValueError(f"model: expected layers that can be compared one by one, got {told} {got}")


def _has_positions(layer: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether ``layer`` computes the same for any arrangement of samples and positions in its input, (N, C, \\*)."""
    is_plain = type(layer).forward in (SyncBatchNorm.forward, _BatchNorm.forward, nn.SyncBatchNorm.forward)
    return is_plain and not kwargs and len(args) == 1 and args[0].dim() > 2


def _arranged(input: Tensor) -> Tensor:
    """Returns ``input`` (N, C, \\*) as (1, C, positions of all samples, 1, ...)."""
    return input.transpose(0, 1).reshape(1, input.size(1), -1, *[1] * (input.dim() - 3))


def _share(whole: Tensor, shapes: Any, rank: int) -> Tensor:
    share = share_of(whole, shapes, rank)
    if share is None:
        raise ValueError(f"model: expected layers whose outputs join as their inputs, got {shapes} and {whole.shape}")
    return share


def _how(layer: nn.Module, finding: Finding | None) -> str:
    """Returns how ``layer`` synchronizes."""
    if isinstance(layer, SyncBatchNorm):
        return f"it synchronizes with process_group={layer._group_spec!r}"
    return "it is not converted" if finding is None or finding.action == "converted" else finding.reason
