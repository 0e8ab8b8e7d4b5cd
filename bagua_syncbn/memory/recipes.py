"""Recomputed outputs: autograd saves a recipe in place of a layer's output, and backward makes the output from it.

A layer saves its input x, and later operations save its output y, or an activation of y. Both are elementwise functions
of x, so while :func:`recompute_outputs` is in force autograd saves a recipe in their place: x itself, the factors of
the layer, and the activation. A tensor is known to be an output, never assumed: the step leaves the recipe at the
autograd node of y; the node of an activation leads to that node and has its formula; and a write to y gives y another
version or another node.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from .. import ops
from ..errors import raise_torchs
from ..names import name_of
from ..step.call import Normalization
from ..threads import this_thread
from ..torch_internals.modules import saving_hooks, takes_saving_hooks

# By the name of the node that autograd has for an operation, without its last digit: for some, the operation in place
# has a node of its own. Names of nodes for functions that are written in Python end in no digit.
_NODES: dict[str, Callable[[Any], str | tuple[str, float] | None]] = {
    "CloneBackward": lambda node: "identity",  # which some activations in place store
    "ReluBackward": lambda node: "relu",
    "HardtanhBackward": lambda node: "relu6" if (node._saved_min_val, node._saved_max_val) == (0, 6) else None,
    "LeakyReluBackward": lambda node: ("leaky_relu", node._saved_negative_slope),
    "EluBackward": lambda node: (
        ("elu", node._saved_alpha) if node._saved_scale == node._saved_input_scale == 1 else None
    ),
    "SiluBackward": lambda node: "silu",
    "GeluBackward": lambda node: "gelu" if node._saved_approximate == "none" else "gelu_tanh",
    "HardswishBackward": lambda node: "hardswish",
    "SigmoidBackward": lambda node: "sigmoid",
    "TanhBackward": lambda node: "tanh",
}


class _Depth(threading.local):
    entered = 0  # number of entered recompute_outputs contexts


_depth = _Depth()


def depth() -> int:
    """Returns how many :class:`Recomputed` contexts this thread is in."""
    return _depth.entered


def _set_depth(entered: int) -> None:
    _depth.entered = entered
    this_thread.see_output = _note_output if entered else None


class Recomputed(AbstractContextManager[None]):
    """Context in which autograd saves recipes in place of the outputs of layers."""

    def __init__(self) -> None:
        self._hooks: list[saved_tensors_hooks | None] = []

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        may_hook = takes_saving_hooks() and saving_hooks() is None
        hooks = saved_tensors_hooks(_pack, _unpack) if may_hook else None
        if hooks is not None:
            hooks.__enter__()
        self._hooks.append(hooks)
        _set_depth(depth() + 1)

    def __exit__(self, *error: object) -> None:
        if not self._hooks:  # torch.compile has traced the entry
            return
        _set_depth(depth() - 1)
        hooks = self._hooks.pop()
        if hooks is not None:
            hooks.__exit__(*error)


class _Remade:
    """A tensor that ``make`` makes again in backward, once for all operations that have packed it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._packed = self._waiting = 0
        self._made: Tensor | None = None

    def pack(self, tensor: Tensor | None = None) -> Callable[[], Tensor]:
        """Returns a function that makes the tensor, or its view ``tensor``."""
        self._packed += 1
        if tensor is None or tensor._base is None:
            return self._unpack
        return partial(self._unpack_view, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack_view(self, size: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt) -> Tensor:
        return self._unpack().as_strided(size, stride, offset)

    def _unpack(self) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made, self._waiting = self._make(), self._packed
        made = self._made
        self._waiting -= 1
        if self._waiting == 0:
            self._made = None
        return made


class _Recipe:
    """How to make an output of a layer and activations of it, and whether a tensor still has their values."""

    def __init__(self, output: Tensor, make: Callable[[], Tensor]) -> None:
        self._normalized = _Remade(make)
        self._version, self._storage = output._version, output.untyped_storage()._cdata
        self._shape = output.dtype, output.size(), output.stride()
        # Its version counts writes to the output, also after the end of the output. It holds no memory of the output.
        self._writes = output.detach()
        self._writes.data = output.new_empty(0)
        self._activated: WeakValueDictionary[ops.Activation, _Remade] = WeakValueDictionary()

    def of_output(self, tensor: Tensor) -> _Remade | None:
        """Returns what makes ``tensor``, the layer's output; None if it was written to."""
        return self._normalized if tensor._version == self._version and tensor.dtype == self._shape[0] else None

    def of_activation(self, activation: ops.Activation, tensor: Tensor) -> _Remade | None:
        """Returns what makes ``tensor``, the activation's output; None if it or the layer's output was written to.

        The write of an activation that works in place does not count.
        """
        is_in_place = tensor.untyped_storage()._cdata == self._storage
        if self._writes._version != self._version + is_in_place:
            return None
        if tensor._version != (self._writes._version if is_in_place else 0):
            return None
        if (tensor.dtype, tensor.size(), tensor.stride()) != self._shape:
            return None
        if activation == ops.IDENTITY:
            return self._normalized
        activated = self._activated.get(activation)
        if activated is None:
            normalized = self._normalized.pack()
            activated = self._activated[activation] = _Remade(lambda: activation.of(normalized()))
        return activated


def _note_output(
    output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Normalization,
) -> None:
    """Leaves the recipe of ``output`` at its autograd node.

    An output with a residual gets none: the residual of a block is the output of the block before, and so on.
    """
    if norm.exchange is None or norm.statistics is None or output.grad_fn is None or residual is not None:
        return
    hooks = saving_hooks()
    if hooks is None or hooks[0] is not _pack or _recipe_of(input) is not None:
        return
    # Copied, because parameters may change before backward, and sharded ones are freed after forward.
    weight, bias = (None if parameter is None else parameter.detach().clone() for parameter in (weight, bias))
    factors = weight, bias, *norm.statistics[:2]
    make = partial(_recomputed, name_of(norm.layer), input.detach(), input._version, factors, norm)
    # By the number of the output: replicas have a node together.
    vars(output.grad_fn).setdefault("recipes", {})[output.output_nr] = _Recipe(output, make)


def _recomputed(
    name: str, input: Tensor, version: int, factors: Sequence[Tensor | None], norm: Normalization
) -> Tensor:
    if input._version != version:
        raise RuntimeError(
            f"{name}: expected an input that stays as it was until backward, from which recompute_outputs "
            "recomputes the output; it was written to in place"
        )
    activation = norm.options.activation or ops.IDENTITY
    try:
        made: Tensor = ops.batch_norm_elemt(input, *factors, None, activation.code, activation.parameter)
    except RuntimeError as error:
        raise_torchs(error)
        raise
    return made if norm.masking is None else norm.masking.clear_outputs(made)


def _recipe_of(tensor: Tensor) -> _Remade | None:
    """Returns the recipe of ``tensor``, or of the tensor that it is a view of; None if its values have none.

    The autograd graph tells the origin: a layer, or an activation of torch applied to the output of a layer.
    """
    whole = tensor if tensor._base is None else tensor._base
    node = whole.grad_fn
    recipe = _recipe_at(node, whole.output_nr)
    if recipe is not None:
        return recipe.of_output(whole)
    activation = None if node is None else _activation_recorded_by(node)
    if node is None or activation is None:
        return None
    recipe = _recipe_at(*node.next_functions[0])
    return None if recipe is None else recipe.of_activation(activation, whole)


def _recipe_at(node: Node | None, number: int) -> _Recipe | None:
    recipes: dict[int, _Recipe] | None = getattr(node, "recipes", None)
    return None if recipes is None else recipes.get(number)


def _pack(tensor: Tensor) -> Callable[[], Tensor]:
    recipe = _recipe_of(tensor)
    if recipe is not None:
        return recipe.pack(tensor)
    return partial(_kept, tensor.detach(), tensor._version)


def _unpack(packed: Callable[[], Tensor]) -> Tensor:
    return packed()


def _kept(tensor: Tensor, version: int) -> Tensor:
    """Returns ``tensor`` after the check that torch makes where there are no hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead. torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its gradient"
        )
    return tensor


def _activation_recorded_by(node: Any) -> ops.Activation | None:
    """Returns the activation that a node of autograd was made for; None for any other node."""
    recorded = _NODES.get(node.name()[:-1])
    found = None if recorded is None else recorded(node)
    if found is None:
        return None
    return ops.IDENTITY if found == "identity" else ops.activation_of(found)
