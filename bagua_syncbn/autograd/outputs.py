"""Outputs that nobody stores: what autograd is to save of a layer's output is made anew when backward asks for it.

A layer saves its input x, and what comes after it saves its output y, or an activation of y. Both are elementwise
functions of x, so while :func:`recompute_outputs` is in force, what is saved of them is a recipe: x, of which no copy
is made, the factors of the layer, and the activation. Which tensors are outputs is known and not concluded. The step
leaves the recipe at the node of autograd that y came from; the node of an activation leads to that one and has its
formula; and a write to y gives it another version or another node.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import ops
from ..sync import name_of
from ..torch_internals import may_hook_saving, saving_hooks


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0  # of the contexts of recompute_outputs that it is in, in a repetition as in the first run
        self.runs: list[Any] = []  # of checkpointed regions that it is in, the innermost last, see checkpointing.py


this_thread = _Local()


class Recomputed(AbstractContextManager[None]):
    """Keeps outputs of layers from being stored while it is entered."""

    def __init__(self) -> None:
        self._hooks: list[saved_tensors_hooks | None] = []

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        hooks = saved_tensors_hooks(_pack, _unpack) if may_hook_saving() else None
        if hooks is not None:
            hooks.__enter__()
        self._hooks.append(hooks)
        this_thread.depth += 1

    def __exit__(self, *error: object) -> None:
        if not self._hooks:  # torch.compile has traced the entry
            return
        this_thread.depth -= 1
        hooks = self._hooks.pop()
        if hooks is not None:
            hooks.__exit__(*error)


class _Remade:
    """A tensor that is made anew in backward: once for all who wait for it."""

    def __init__(self) -> None:
        self._takers = self._waiting = 0
        self._made: Tensor | None = None

    def promise(self, tensor: Tensor | None = None) -> Callable[[], Tensor]:
        """Returns what gives the whole, or ``tensor`` if that is a view of it."""
        self._takers += 1
        if tensor is None or tensor._base is None:
            return self._take
        return partial(self._take_view, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _take_view(self, size: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt) -> Tensor:
        return self._take().as_strided(size, stride, offset)

    def _take(self) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made, self._waiting = self._make(), self._takers
        made = self._made
        self._waiting -= 1
        if self._waiting == 0:
            self._made = None
        return made

    def _make(self) -> Tensor:
        raise NotImplementedError


class _Recipe(_Remade):
    """How an output is made from its input, and what an activation makes of it."""

    def __init__(
        self,
        name: str,
        output: Tensor,
        input: Tensor,
        factors: tuple[Tensor | None, ...],
        activation: ops.Activation | None,
        zeroed: Tensor | None,
    ) -> None:
        super().__init__()
        self._name = name
        self._input, self._input_version = input.detach(), input._version
        self._factors, self._activation, self._zeroed = factors, activation, zeroed
        self._version, self._storage = output._version, output.untyped_storage()._cdata
        self._shape = output.dtype, output.size(), output.stride()
        # Counts the writes to the output, also after that has gone, and holds none of its memory.
        self._writes = output.detach()
        self._writes.data = output.new_empty(0)
        self._activated: WeakValueDictionary[ops.Activation, _Activated] = WeakValueDictionary()

    def has_made(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which comes from the layer, has the values that the layer gave it."""
        return tensor._version == self._version and tensor.dtype == self._shape[0]

    def of_activation(self, activation: ops.Activation, tensor: Tensor) -> "_Remade | None":
        """Returns how ``tensor``, which the activation has made of the output, is made; None if it was written to.

        Or if the output was, but by the activation itself where that works in place.
        """
        is_in_place = tensor.untyped_storage()._cdata == self._storage
        if self._writes._version != self._version + is_in_place:
            return None
        if tensor._version != (self._writes._version if is_in_place else 0):
            return None
        if (tensor.dtype, tensor.size(), tensor.stride()) != self._shape:
            return None
        if activation == ops.IDENTITY:
            return self
        activated = self._activated.get(activation)
        if activated is None:
            activated = self._activated[activation] = _Activated(self, activation)
        return activated

    def _make(self) -> Tensor:
        if self._input._version != self._input_version:
            raise RuntimeError(
                f"{self._name}: expected an input that stays as it was until backward, from which recompute_outputs "
                "makes the output anew; it was written to in place"
            )
        activation = self._activation or ops.IDENTITY
        made: Tensor = ops.batch_norm_elemt(
            self._input, *self._factors, self._zeroed, None, activation.code, activation.parameter
        )
        return made


class _Activated(_Remade):
    """An activation of a layer's output, by the operation of torch that has made it before."""

    def __init__(self, recipe: _Recipe, activation: ops.Activation) -> None:
        super().__init__()
        self._normalized, self._activation = recipe.promise(), activation

    def _make(self) -> Tensor:
        return self._activation.of(self._normalized())


def note_output(
    output: Tensor,
    layer: nn.Module | str | None,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    residual: Tensor | None,
    activation: ops.Activation | None,
    zeroed: Tensor | None = None,
) -> None:
    """Notes how ``layer`` has made ``output``, which is 0 outside of the mask ``zeroed``, if outputs are recomputed.

    Not where it has added a residual: that of a block is the output of the one before, and so on.
    """
    if torch.compiler.is_compiling() or this_thread.depth == 0 or output.grad_fn is None:
        return
    if residual is not None:
        return
    hooks = saving_hooks()
    if hooks is None or hooks[0] is not _pack or _recipe_of(input) is not None:
        return
    # Copies: parameters may change before backward, and fully sharded ones are not even there.
    weight, bias = (None if parameter is None else parameter.detach().clone() for parameter in (weight, bias))
    factors = weight, bias, mean, invstd
    recipe = _Recipe(_name_of(layer), output, input, factors, activation, zeroed)
    output.grad_fn.recipe = recipe  # type: ignore[attr-defined]


def _name_of(layer: nn.Module | str | None) -> str:
    return layer if isinstance(layer, str) else name_of(layer)


def _recipe_of(tensor: Tensor) -> _Remade | None:
    """Returns how ``tensor`` is made, or what it is a view of; None where nothing says so of its present values.

    The graph of autograd says what has made it: a layer, or an activation of torch from the output of a layer.
    """
    whole = tensor if tensor._base is None else tensor._base
    node = whole.grad_fn
    recipe = getattr(node, "recipe", None)
    if isinstance(recipe, _Recipe):
        return recipe if recipe.has_made(whole) else None
    activation = None if node is None else ops.activation_recorded_by(node)
    if node is None or activation is None:
        return None
    recipe = getattr(node.next_functions[0][0], "recipe", None)
    return recipe.of_activation(activation, whole) if isinstance(recipe, _Recipe) else None


def _pack(tensor: Tensor) -> Callable[[], Tensor]:
    recipe = _recipe_of(tensor)
    if recipe is not None:
        return recipe.promise(tensor)
    return partial(_kept, tensor.detach(), tensor._version)


def _unpack(packed: Callable[[], Tensor]) -> Tensor:
    return packed()


def _kept(tensor: Tensor, version: int) -> Tensor:
    """What torch does of itself where there are no hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead. torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its gradient"
        )
    return tensor
