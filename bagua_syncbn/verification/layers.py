"""Layers one by one: each on the inputs that it meets on the ranks, against itself in one process on all of them."""

from collections.abc import Callable, Iterator, Sequence
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
from .comparison import Pair, differences, first_of
from .ranks import Ranks, in_float64, joined, share_of
from .steps import called, digest


class LayerChecks:
    """Checks of the batch normalization layers of a model, made in its forward passes in training."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        findings = {finding.module: finding for finding in conversion_report(model).layers}
        self._layers = {
            module: (called(module, name), _how(module, findings.get(module)))
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) or (module in findings and findings[module].action == "skipped")
        }
        self._at_work = False
        self.compared = 0
        self.left_out: list[str] = []
        """Calls of layers that cannot be compared, and why not."""
        self.differ: dict[nn.Module, str] = {}
        """What differs in each layer that does."""
        self.unlike: dict[str, None] = {}
        """Parameters and buffers of layers that differ between ranks before the step."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which each call of a layer is checked before it is made."""
        handles = [layer.register_forward_pre_hook(self._check, with_kwargs=True) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        told, how = self._layers[layer]
        if self._at_work or not layer.training or layer in self.differ:
            return
        reason = _why_not_compared(layer, (args, kwargs))
        if reason is not None:
            self.left_out.append(f"{told}, which {reason}")
            return
        self._at_work = True
        try:
            with torch.enable_grad():  # the pass itself may be without gradients
                found = self._compare(told, layer, (args, kwargs))
        except _NotComparedError as error:
            self.left_out.append(f"{told}, which {error}")
            return
        finally:
            self._at_work = False
        self.compared += 1
        if found is not None:
            self.differ[layer] = f"{told} is not as in one process on the inputs that it meets: {found}; {how}"

    def _compare(self, told: str, layer: nn.Module, given: Any) -> str | None:
        """Returns what differs between a step of ``layer`` on the ranks and one of it alone on all inputs."""
        ranks = self._ranks
        inputs, states = zip(*ranks.together(f"the input of {told}", lambda: (given, _state_of(layer))), strict=True)
        state = states[0]
        for name in state:
            if any(digest(own[name]) != digest(state[name]) for own in states):
                self.unlike[f"{name} of {told} differs between ranks before the step"] = None
        arrange = _arranged if all(_has_positions_alone(layer, own) for own in inputs) else _as_it_is
        alone = _Forward(layer, in_float64(_all_of(inputs, arrange), given), state, is_alone=True)
        forwards: list[_Forward] = []

        def forward() -> torch.Size:
            forwards.append(_Forward(layer, in_float64(given, given), state))
            return arrange(forwards[0].output).shape

        shapes = ranks.together(f"the forward of {told}", forward)
        own, output = forwards[0], arrange(forwards[0].output)
        grad = torch.randn(alone.output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own_grad, expected = share_of(grad, shapes, ranks.rank), share_of(alone.output, shapes, ranks.rank)
        if own_grad is None or expected is None:
            return f"output has sizes {shapes} on the ranks, {list(alone.output.shape)} in one process"
        pairs = [Pair("output", "", output, expected)]
        if output.requires_grad:
            alone.output.backward(grad.to(alone.output))
            output.backward(own_grad.to(output))
            sizes = [arrange(_first_tensor(own)).shape for own in inputs]
            share = share_of(alone.gradient, sizes, ranks.rank)
            assert share is not None
            pairs.append(Pair("gradient of the input", "", arrange(own.gradient), share))
        for name, parameter in own.parameters.items():
            if parameter.grad is not None:
                whole = alone.parameters[name].grad
                assert whole is not None
                pairs.append(Pair("gradient", name, ranks.add_up(parameter.grad), whole))
        pairs += [Pair("buffer", name, own.buffers[name], alone.buffers[name]) for name in own.buffers]
        first = first_of(ranks.together(f"the comparison of {told}", lambda: differences(pairs, ranks.rank)))
        return None if first is None else first.text


class _NotComparedError(Exception):
    """A reason why a layer cannot be compared, which all ranks see."""


def _has_positions_alone(layer: nn.Module, given: Any) -> bool:
    """Whether ``layer`` computes the same for any arrangement of samples and positions in ``given``, (N, C, \\*)."""
    args, kwargs = given
    is_plain = type(layer).forward in (SyncBatchNorm.forward, _BatchNorm.forward, nn.SyncBatchNorm.forward)
    return is_plain and not kwargs and len(args) == 1 and args[0].dim() > 2


def _arranged(input: Tensor) -> Tensor:
    """Returns ``input`` (N, C, \\*) as (1, C, positions of all samples, 1, ...)."""
    return input.transpose(0, 1).reshape(1, input.size(1), -1, *[1] * (input.dim() - 3))


def _as_it_is(input: Tensor) -> Tensor:
    return input


def _all_of(inputs: Sequence[Any], arrange: Callable[[Tensor], Tensor]) -> Any:
    """Returns the arguments of all ranks as one."""
    try:
        if arrange is _as_it_is:
            return joined(inputs, "inputs")
        return (torch.cat([arrange(own) for (own,), _ in inputs], 2),), {}
    except (RuntimeError, ValueError) as error:
        raise _NotComparedError(f"has inputs that cannot be joined: {error}") from error


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
            self.output: Tensor = forward(*args, **kwargs)
        finally:
            for part, attributes in before:
                vars(part).clear()
                vars(part).update(attributes)

    @property
    def gradient(self) -> Tensor:
        """The gradient of the input."""
        return torch.zeros_like(self.input) if self.input.grad is None else self.input.grad


def _state_of(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _first_tensor(given: Any) -> Tensor:
    found: Tensor = next(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
    return found


def _why_not_compared(layer: nn.Module, given: Any) -> str | None:
    if getattr(layer, "_masking", None) is not None or getattr(layer, "_accumulator", None) is not None:
        return "is within masked or accumulate_statistics"
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    if not tensors:
        return "was called with no tensor"
    if any(map(is_distributed, (*tensors, *_state_of(layer).values()))):
        return "has or was given a DTensor"
    return None


def _how(layer: nn.Module, finding: Finding | None) -> str:
    """Returns how ``layer`` synchronizes."""
    if isinstance(layer, SyncBatchNorm):
        return f"it synchronizes with process_group={layer._group_spec!r}"
    return "it is not converted" if finding is None or finding.action == "converted" else finding.reason
