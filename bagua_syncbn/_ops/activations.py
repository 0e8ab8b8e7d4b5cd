"""Activations that a layer can fuse: names, formulas, gradients and parameters.

The native kernels have the same list, in the same order, in ``csrc/activations.h``.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Formula(NamedTuple):
    value: Callable[[Tensor, float], Tensor]  # differentiable any number of times
    gradient: Callable[[Tensor, Tensor, float], Tensor]  # grad_output times the derivative
    parameter: float | None = None  # torch's default; None for activations without a parameter
    is_cheap: bool = False  # whether computing it on a CPU is faster than loading or storing it


_aten = torch.ops.aten
# The gradients equal torch's, even at kinks.
_FORMULAS = {
    "identity": _Formula(lambda z, _: z, lambda dy, z, _: dy),
    "relu": _Formula(lambda z, _: F.relu(z), lambda dy, z, _: _aten.threshold_backward(dy, z, 0), is_cheap=True),
    "relu6": _Formula(lambda z, _: F.relu6(z), lambda dy, z, _: _aten.hardtanh_backward(dy, z, 0, 6), is_cheap=True),
    "leaky_relu": _Formula(
        lambda z, p: F.leaky_relu(z, p), lambda dy, z, p: _aten.leaky_relu_backward(dy, z, p, False), 0.01, True
    ),
    "elu": _Formula(lambda z, p: F.elu(z, p), lambda dy, z, p: _aten.elu_backward(dy, p, 1, 1, False, z), 1.0),
    "silu": _Formula(lambda z, _: F.silu(z), lambda dy, z, _: _aten.silu_backward(dy, z)),
    "gelu": _Formula(lambda z, _: F.gelu(z), lambda dy, z, _: _aten.gelu_backward(dy, z)),
    "gelu_tanh": _Formula(
        lambda z, _: F.gelu(z, approximate="tanh"), lambda dy, z, _: _aten.gelu_backward(dy, z, approximate="tanh")
    ),
    "hardswish": _Formula(lambda z, _: F.hardswish(z), lambda dy, z, _: _aten.hardswish_backward(dy, z), is_cheap=True),
    "sigmoid": _Formula(lambda z, _: torch.sigmoid(z), lambda dy, z, _: _aten.sigmoid_backward(dy, torch.sigmoid(z))),
    "tanh": _Formula(lambda z, _: torch.tanh(z), lambda dy, z, _: _aten.tanh_backward(dy, torch.tanh(z))),
    "mish": _Formula(lambda z, _: F.mish(z), lambda dy, z, _: _aten.mish_backward(dy, z)),
}
_NAMES = list(_FORMULAS)
ACTIVATIONS = _NAMES[1:]
"""Names of the activations."""

MODULES: dict[type[nn.Module], Callable[[Any], str | tuple[str, float]]] = {
    nn.ReLU: lambda module: "relu",
    nn.ReLU6: lambda module: "relu6",
    nn.LeakyReLU: lambda module: ("leaky_relu", module.negative_slope),
    nn.ELU: lambda module: ("elu", module.alpha),
    nn.SiLU: lambda module: "silu",
    nn.GELU: lambda module: "gelu" if module.approximate == "none" else "gelu_tanh",
    nn.Hardswish: lambda module: "hardswish",
    nn.Sigmoid: lambda module: "sigmoid",
    nn.Tanh: lambda module: "tanh",
    nn.Mish: lambda module: "mish",
}
"""Names and parameters of torch's activation modules."""


class Activation(NamedTuple):
    """An activation and its parameter: the slope of ``leaky_relu`` or the alpha of ``elu``, otherwise 0."""

    name: str
    parameter: float = 0.0

    def __repr__(self) -> str:
        """Returns the ``activation`` argument that selects this activation."""
        return repr(self.name if _FORMULAS[self.name].parameter is None else tuple(self))

    @property
    def code(self) -> int:
        """Index that the ops take."""
        return _NAMES.index(self.name)

    @property
    def is_cheap(self) -> bool:
        return _FORMULAS[self.name].is_cheap

    def of(self, z: Tensor) -> Tensor:
        return _FORMULAS[self.name].value(z, self.parameter)


IDENTITY = Activation("identity")


def activation_of(activation: str | tuple[str, float] | nn.Module | None) -> Activation | None:
    """Parses the activation of a layer: a name, a name and a parameter, or one of torch's modules.

    Raises:
        TypeError: ``activation`` has a different type.
        ValueError: the name is unknown, or the parameter is not finite or not expected.
    """
    if activation is None or type(activation) is Activation:
        return activation
    given: Any = activation
    if type(given) in MODULES:
        given = MODULES[type(given)](given)
    name, *parameters = given if isinstance(given, (tuple, list)) and given else (given,)
    known = ", ".join(ACTIVATIONS)
    if not isinstance(name, str) or not all(isinstance(parameter, int | float) for parameter in parameters):
        got = type(given).__name__ if isinstance(given, nn.Module) else repr(given)
        modules = ", ".join(f"nn.{cls.__name__}" for cls in MODULES)
        raise TypeError(f"activation: expected one of {known}, (name, parameter), or one of {modules}, got {got}")
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {known}, got {name!r}")
    default = _FORMULAS[name].parameter
    if len(parameters) > (default is not None):
        expected = "no parameter" if default is None else "one parameter"
        raise ValueError(f"activation: expected {expected} for {name}, got {activation!r}")
    parameter = float(*parameters or (default or 0.0,))
    if not math.isfinite(parameter):
        raise ValueError(f"activation: expected a finite parameter for {name}, got {parameter}")
    return Activation(name, parameter)


def value(z: Tensor, code: int, parameter: float) -> Tensor:
    """Applies the activation with index ``code`` to ``z``."""
    return _FORMULAS[_NAMES[code]].value(z, parameter)


def gradient(grad_output: Tensor, z: Tensor, code: int, parameter: float) -> Tensor:
    """Returns ``grad_output`` times the derivative at ``z`` of the activation with index ``code``."""
    return _FORMULAS[_NAMES[code]].gradient(grad_output, z, parameter)
