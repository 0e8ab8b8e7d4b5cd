"""Causes of a difference, each seen by a test of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import pytree
from .comparison import Pair, differences
from .ranks import Ranks, share_of
from .steps import Loss, called, run


def random_modules(model: nn.Module, batch: Any, loss: Loss) -> list[str]:
    """Returns the modules without children that give other outputs in a second call with the same inputs."""
    found: dict[str, None] = {}
    at_work: list[nn.Module] = []

    def call_again(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if at_work:
                return
            at_work.append(module)
            again = module.forward(*args, **kwargs)
            at_work.clear()
            pairs = zip(tensors_in(output), tensors_in(again), strict=True)
            if any(not torch.equal(first, second) for first, second in pairs):
                found[called(module, name)] = None

        return hook

    for name, module in _leaves(model):
        module.register_forward_hook(call_again(name), with_kwargs=True)
    run(model, batch, loss)
    return list(found)


_Calls = list[tuple[str, list[Tensor], list[Tensor]]]


def calls_of(model: nn.Module) -> _Calls:
    """Returns a list to which a step of ``model`` adds name, inputs and outputs of each module without children."""
    calls: _Calls = []

    def recorder(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append((called(module, name), tensors_in((args, kwargs)), tensors_in(output)))

        return hook

    for name, module in _leaves(model):
        module.register_forward_hook(recorder(name), with_kwargs=True)
    return calls


def first_to_differ(ranks: Ranks, own: _Calls, alone: _Calls) -> str | None:
    """Returns where the forward passes of ranks and of one process part; None where their calls do not correspond."""
    names = [name for name, _, _ in alone]
    told = ranks.together("the calls", lambda: [(name, _shapes(before), _shapes(after)) for name, before, after in own])
    if any([name for name, _, _ in calls] != names for calls in told):
        return None

    def equal() -> list[tuple[bool, bool]]:
        found = []
        for index, ((_, before, after), (_, all_before, all_after)) in enumerate(zip(own, alone, strict=True)):
            sizes_before, sizes_after = ([calls[index][part] for calls in told] for part in (1, 2))
            are_equal = _are_equal(ranks, before, all_before, sizes_before)
            found.append((are_equal, _are_equal(ranks, after, all_after, sizes_after)))
        return found

    for name, *flags in zip(names, *ranks.together("the comparison of calls", equal), strict=True):
        if not all(before for before, _ in flags):
            return f"the input of {name} is the first in the modules to differ"
        if not all(after for _, after in flags):
            return f"the output of {name} is the first in the modules to differ, on equal inputs"
    return None


def _are_equal(ranks: Ranks, own: list[Tensor], alone: list[Tensor], shapes: Any) -> bool:
    pairs = []
    for index, (actual, whole) in enumerate(zip(own, alone, strict=False)):
        expected = share_of(whole, [of_rank[index] for of_rank in shapes], ranks.rank)
        if expected is not None:
            pairs.append(Pair("tensor", "", actual, expected))
    return not differences(pairs, ranks.rank)


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors in nested ``values``."""
    return [leaf.detach() for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if not list(module.children())]


def _shapes(tensors: list[Tensor]) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]
