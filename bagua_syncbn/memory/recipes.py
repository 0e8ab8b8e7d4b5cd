"""Recomputed outputs: autograd saves a recipe instead of a layer's output, and backward computes the output from it.

A layer saves the input x; later operations save the output y, or an activation of y. Output and activation are
elementwise functions of x, so the recipe is x, the layer's factors, and the activation. Outputs are identified by their
autograd nodes. The node of y stores the recipe; an activation's node contains the formula and links to the node of y. A
write to y changes the version or the node.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .. import _ops as ops
from .._errors import raise_if_out_of_memory
from .._names import name_of
from .._step.call import Normalization
from .._step.hooks import hooks
from .._torch.modules import saving_hooks, takes_saving_hooks

# Activations, by name of the autograd node without its last digit, which differs for some in-place operations. Names of
# Python functions' nodes do not end in a digit.
_NODES: dict[str, Callable[[Any], Any]] = {
    "CloneBackward": lambda node: ops.IDENTITY,  # tensors that some in-place activations save
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
    "MishBackward": lambda node: "mish",
}


@contextmanager
def saved_as_recipes() -> Iterator[None]:
    """Context manager in which autograd saves recipes instead of outputs, unless saved-tensor hooks are active."""
    if torch.compiler.is_compiling() or not takes_saving_hooks() or saving_hooks() is not None:
        yield
        return
    with saved_tensors_hooks(_pack, _unpack):
        hooks.see_output = _note_output
        try:
            yield
        finally:
            hooks.see_output = None


class _Recomputed:
    """A tensor that backward computes with ``make``, once for all operations that saved it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._packed = self._waiting = 0
        self._tensor: Tensor | None = None

    def pack(self, saved: Tensor | None = None) -> Callable[[], Tensor]:
        """Returns a function that recomputes the tensor; if ``saved`` is a view, the function returns this view."""
        self._packed += 1
        if saved is None or saved._base is None:
            return partial(self._unpack, None)
        return partial(self._unpack, (saved.size(), saved.stride(), saved.storage_offset()))

    def _unpack(self, view: Any) -> Tensor:
        if self._tensor is None:
            with torch.no_grad():
                self._tensor, self._waiting = self._make(), self._packed
        tensor = self._tensor
        self._waiting -= 1
        if self._waiting == 0:
            self._tensor = None
        return tensor if view is None else tensor.as_strided(*view)


class _Recipe:
    """Recomputes a layer's output and activations, and detects tensors that were written to."""

    def __init__(self, output: Tensor, make: Callable[[], Tensor]) -> None:
        self._output = _Recomputed(make)
        self._version, self._storage = output._version, output.untyped_storage()._cdata
        self._layout = output.dtype, output.size(), output.stride()
        # Shares the version counter, which counts writes to the output, but no memory.
        self._writes = output.detach()
        self._writes.data = output.new_empty(0)
        self._activated: WeakValueDictionary[ops.Activation, _Recomputed] = WeakValueDictionary()

    def of(self, tensor: Tensor, activation: ops.Activation | None) -> _Recomputed | None:
        """Returns the recipe for ``tensor``, the output or an ``activation`` of it; None if it was written to.

        Ignores the write of an in-place activation itself.
        """
        shares_memory = tensor.untyped_storage()._cdata == self._storage
        is_in_place = shares_memory and activation is not None
        if self._writes._version != self._version + is_in_place:
            return None
        if tensor._version != (self._writes._version if shares_memory else 0):
            return None
        if (tensor.dtype, tensor.size(), tensor.stride()) != self._layout:
            return None
        if activation is None or activation == ops.IDENTITY:
            return self._output
        activated = self._activated.get(activation)
        if activated is None:
            output = self._output.pack()
            activated = self._activated[activation] = _Recomputed(lambda: activation.of(output()))
        return activated


def _note_output(
    output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Normalization,
) -> None:
    """Stores the recipe of ``output`` at its autograd node.

    Outputs with a residual have no recipe, because recomputation would need the outputs of all previous blocks.
    """
    if norm.step.exchange is None or norm.statistics is None or output.grad_fn is None or residual is not None:
        return
    saving = saving_hooks()
    if saving is None or saving[0] is not _pack or _recipe_of(input) is not None:
        return
    # Copies, because parameters may change before backward, and sharded parameters are freed after forward.
    weight, bias = (None if parameter is None else parameter.detach().clone() for parameter in (weight, bias))
    factors = weight, bias, *norm.statistics[:2]
    make = partial(_normalized, input.detach(), input._version, factors, norm)
    # Keyed by output number, like autograd's edges.
    vars(output.grad_fn).setdefault("recipes", {})[output.output_nr] = _Recipe(output, make)


def _normalized(input: Tensor, version: int, factors: Sequence[Tensor | None], norm: Normalization) -> Tensor:
    if input._version != version:
        raise RuntimeError(
            f"{name_of(norm.layer)}: the input was written to in place after the forward pass, so recompute_outputs "
            "cannot recompute the output; write to a copy, or turn off recompute_outputs for this model"
        )
    activation = norm.step.options.activation or ops.IDENTITY
    try:
        output: Tensor = ops.batch_norm_elemt(input, *factors, None, activation.code, activation.parameter)
    except RuntimeError as error:
        raise_if_out_of_memory(error)
        raise
    return output if norm.masking is None else norm.masking.clear_outputs(output)


def _recipe_of(tensor: Tensor) -> _Recomputed | None:
    """Returns the recipe for ``tensor``, or for its base if it is a view; None if there is no recipe."""
    whole = tensor if tensor._base is None else tensor._base
    node, number, activation = whole.grad_fn, whole.output_nr, None
    if node is not None and not hasattr(node, "recipes"):
        activation_at = _NODES.get(node.name()[:-1], lambda node: None)
        activation = ops.activation_of(activation_at(node))
        node, number = (None, 0) if activation is None else node.next_functions[0]
    recipes: dict[int, _Recipe] = getattr(node, "recipes", None) or {}
    return recipes[number].of(whole, activation) if number in recipes else None


def _pack(tensor: Tensor) -> Callable[[], Tensor]:
    recipe = _recipe_of(tensor)
    return partial(_unchanged, tensor.detach(), tensor._version) if recipe is None else recipe.pack(tensor)


def _unpack(packed: Callable[[], Tensor]) -> Tensor:
    return packed()


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """Returns ``tensor`` after torch's version check, which torch skips for saved tensors with hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )
    return tensor
