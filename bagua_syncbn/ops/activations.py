"""The activations that a layer can compute with its normalization: name, formula, derivative and parameter of each.

The native kernels have the same table in ``csrc/activations.inl``, in the same order.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_Function = Callable[[Tensor, float], Tensor]


class _Formula(NamedTuple):
    value: _Function  # in operations of torch that can be differentiated any number of times
    derivative: _Function
    parameter: float | None = None  # as torch has it where none is given; None for activations without


def _normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))


def _grad_silu(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _grad_gelu(z: Tensor) -> Tensor:
    return _normal_cdf(z) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _grad_gelu_tanh(z: Tensor) -> Tensor:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (z + cubic * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * scale * (1 + 3 * cubic * z * z)


_FORMULAS = {
    "identity": _Formula(lambda z, _: z, lambda z, _: torch.ones_like(z)),
    "relu": _Formula(lambda z, _: F.relu(z), lambda z, _: (z > 0).to(z.dtype)),
    "relu6": _Formula(lambda z, _: F.relu6(z), lambda z, _: ((z > 0) & (z < 6)).to(z.dtype)),
    "leaky_relu": _Formula(lambda z, p: F.leaky_relu(z, p), lambda z, p: torch.ones_like(z).where(z > 0, p), 0.01),
    "elu": _Formula(lambda z, p: F.elu(z, p), lambda z, p: torch.where(z > 0, 1.0, p * torch.exp(z)), 1.0),
    "silu": _Formula(lambda z, _: F.silu(z), lambda z, _: _grad_silu(z)),
    "gelu": _Formula(lambda z, _: F.gelu(z), lambda z, _: _grad_gelu(z)),
    "gelu_tanh": _Formula(lambda z, _: F.gelu(z, approximate="tanh"), lambda z, _: _grad_gelu_tanh(z)),
    "hardswish": _Formula(
        lambda z, _: F.hardswish(z),
        lambda z, _: torch.where(z <= -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0)),
    ),
    "sigmoid": _Formula(lambda z, _: torch.sigmoid(z), lambda z, _: torch.sigmoid(z) * torch.sigmoid(-z)),
    "tanh": _Formula(lambda z, _: torch.tanh(z), lambda z, _: 1 - torch.tanh(z).square()),
}
_NAMES = list(_FORMULAS)
ACTIVATIONS = _NAMES[1:]
"""The names of the activations."""


class Activation(NamedTuple):
    """An activation, and its parameter: the slope of ``leaky_relu``, the alpha of ``elu``; 0 for any other."""

    name: str
    parameter: float = 0.0

    def __str__(self) -> str:
        """As it is given to a layer."""
        return repr(self.name if _FORMULAS[self.name].parameter is None else tuple(self))

    @property
    def code(self) -> int:
        """Its number in the schemas of the ops."""
        return _NAMES.index(self.name)

    def __call__(self, z: Tensor) -> Tensor:
        return _FORMULAS[self.name].value(z, self.parameter)


IDENTITY = Activation("identity")


def activation_of(activation: str | tuple[str, float] | None) -> Activation | None:
    """Returns what ``activation`` names: a name, or a name and a parameter.

    Raises:
        ValueError: it names none, or gives a parameter to an activation that has none.
    """
    if activation is None or type(activation) is Activation:
        return activation
    name, *parameters = (activation,) if isinstance(activation, str) else activation
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    default = _FORMULAS[name].parameter
    if len(parameters) > (default is not None):
        expected = "a name alone" if default is None else "a name and one parameter"
        raise ValueError(f"activation: expected {expected} for {name}, got {activation!r}")
    return Activation(name, float(*parameters or (default or 0.0,)))


def value(z: Tensor, code: int, parameter: float) -> Tensor:
    """Returns the activation of ``code`` at ``z``."""
    return _FORMULAS[_NAMES[code]].value(z, parameter)


def derivative(z: Tensor, code: int, parameter: float) -> Tensor:
    """Returns the derivative at ``z``: where there is a kink, that of torch."""
    return _FORMULAS[_NAMES[code]].derivative(z, parameter)
