"""Which activation modules alone read the output of a layer, so that the layer can do their work.

Known from the forward that calls both, which torch.fx reads with every module in it as one node; and not assumed where
that forward asks what torch.fx cannot answer as in a real call.
"""

import copy
import operator
import sys
import warnings
from collections.abc import Iterator
from inspect import Parameter, signature
from itertools import product
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx, nn

from ..following import (
    CHAINS,
    PASSING,
    Chains,
    PassingOn,
    codes_of,
    module_at,
    returns_its_input,
    unfuse_activations,
    whose_forward_is,
)
from ..sync_batchnorm import SyncBatchNorm
from .classes import class_before_conversion
from .convert import forget_compiled_code
from .findings import check_module
from .own_forward import BATCH_NORMS, ObservedSyncBatchNorm

_Module = TypeVar("_Module", bound=nn.Module)

# A forward that names one of these may do other things with a tensor than with what torch.fx gives it.
_QUESTIONS = {"isinstance", "issubclass", "type", "hasattr", "getattr", "is_tensor", "callable"}
_MOST_CHOICES = 4
_OF_ANY_NUMBER = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
_SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_ANY = object()  # what is given for an argument that may be None


class _Reading(NamedTuple):
    """What is known of the forward of one module: chains by path, and for each layer what it does or why not."""

    chains: Chains
    notes: dict[nn.Module, str]


def fuse_activations(module: _Module) -> _Module:
    """Has the synchronized layers of a model compute the activations that follow them, in place.

    Between a layer and an activation only the input of the layer is stored for the backward pass, and both are one pass
    over memory. The outputs stay what they were, up to the rounding of what went between. It takes layers whose output
    is read by one module, such as :class:`torch.nn.ReLU`, of an activation that layers can compute, and by nothing
    else, where ``torch.fx`` can see that in the forward that calls the two: neighbours in
    :class:`torch.nn.Sequential`, blocks with one activation for several layers, layers with a forward of their own that
    ends in an activation. All else stays as it is; :func:`conversion_report` has the reasons.

    Objects, forward code, names, hooks and state dict stay. Activations get a subclass of their class, and pass on
    what a layer has done for them. Where other code calls a layer or a method that calls one, where hooks of the layer
    or of the activation could see what goes between them, and while torch.compile, ``torch.jit.trace`` or
    ``torch.export`` trace, each does its own work. Call it when the model is whole: what the forward code decides by
    attributes of the model must stay decided, or call it again.

    Args:
        module: the model, converted by :func:`convert_sync_batchnorm`.

    Returns:
        ``module``, the same object. :func:`revert_sync_batchnorm` undoes it.

    Raises:
        TypeError: ``module`` is no module.

    Example::

        >>> model = bagua_syncbn.fuse_activations(bagua_syncbn.convert_sync_batchnorm(model))
        >>> print(bagua_syncbn.conversion_report(model))
    """
    check_module(module)
    unfuse_activations(module)
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    notes: dict[nn.Module, set[str]] = {layer: set() for layer in layers}
    fused = 0
    for parent in list(module.modules()):
        reading = _read(parent)
        for layer, note in reading.notes.items():
            notes[layer].add(note)
        if reading.chains:
            vars(parent)[CHAINS] = reading.chains
            fused += len(reading.chains)
            for path, chain in reading.chains.items():
                vars(module_at(parent, path))["is_followed"] = True
                activation: Any = module_at(parent, chain[-1])
                if not isinstance(activation, PassingOn):
                    object.__setattr__(activation, "__class__", PASSING[type(activation)])
    for layer, found in notes.items():
        vars(layer)["activation_note"] = "; ".join(sorted(found)) or "no forward was found that calls it"
    forget_compiled_code(module)
    if not fused:
        warnings.warn("fuse_activations: found no activation to fuse; conversion_report tells why", stacklevel=2)
    return module


def _read(parent: nn.Module) -> _Reading:
    layers = set(_layers_called_by(parent))
    if not layers:
        return _Reading({}, {})
    cls = type(parent)
    if isinstance(parent, ObservedSyncBatchNorm):
        cls = class_before_conversion(cls)
    where = f"the forward of {cls.__name__}"
    asked = {name for code in codes_of(cls) for name in code.co_names} & _QUESTIONS  # type: ignore[arg-type]
    reason = None
    if isinstance(parent, torch.jit.ScriptModule) or "forward" in vars(parent):
        reason = f"{where} was replaced"
    elif asked:
        reason = f"{where} depends on what {', '.join(sorted(asked))} says"
    try:
        graphs = [] if reason else list(_traces(parent, cls))
    except Exception as error:
        reason = f"torch.fx cannot follow {where}: {str(error).partition(chr(10))[0] or type(error).__name__}"
    if reason:
        return _Reading({}, dict.fromkeys(layers, f"computes no activation, as {reason}"))
    return _combined(parent, where, layers, graphs)


def _layers_called_by(parent: nn.Module) -> Iterator[nn.Module]:
    """The layers that the forward of ``parent`` may call: its own, those in its lists, and itself."""
    if isinstance(parent, ObservedSyncBatchNorm):
        yield parent
    if _is_a_list(parent):
        return
    waiting = list(parent.children())
    while waiting:
        child = waiting.pop()
        if isinstance(child, SyncBatchNorm) and not isinstance(child, ObservedSyncBatchNorm):
            yield child
        elif _is_a_list(child):
            waiting += child.children()


def _is_a_list(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


class _Tracer(fx.Tracer):
    patched: CodeType | None = None  # what torch.fx makes of a forward that takes any number of arguments

    def create_args_for_root(self, root_fn: Any, *args: Any, **kwargs: Any) -> Any:
        function, values = super().create_args_for_root(root_fn, *args, **kwargs)
        if function is not root_fn:
            self.patched = function.__code__
        return function, values

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(m, SyncBatchNorm) and whose_forward_is(sys._getframe(2), self.patched) is not self.root:
            raise ValueError("a function that is no method of it calls a layer")
        return super().call_module(m, forward, args, kwargs)


def _traces(parent: nn.Module, cls: type[nn.Module]) -> Iterator[fx.Graph]:
    """Yields what the forward does in training and in evaluation, for each value of flags and of what may be None."""
    _, *parameters = signature(cls.forward).parameters.items()
    choices: list[list[tuple[str, Any]]] = []
    for index, (name, parameter) in enumerate(parameters):
        is_required = parameter.default is parameter.empty and parameter.kind not in _OF_ANY_NUMBER
        if parameter.default is None or (index > 0 and is_required):
            choices.append([(name, None), (name, _ANY)])
        elif isinstance(parameter.default, bool):
            choices.append([(name, True), (name, False)])
    if len(choices) > _MOST_CHOICES:
        raise ValueError("too many optional arguments")
    for training, *given in product((True, False), *choices):
        shadow = _shadow(parent, cls, training)
        known = {name: value for name, value in given if value is not _ANY}
        try:
            graph = _Tracer().trace(shadow, concrete_args=known)
        except (AttributeError, TypeError) as error:
            if "NoneType" in str(error):  # so does a real call then
                continue
            raise
        if any(_holds_proxy(value) for value in vars(shadow).values()):
            raise ValueError("it keeps tensors")
        yield graph


def _shadow(parent: nn.Module, cls: type[nn.Module], training: bool) -> nn.Module:
    """Returns a module with the parts of ``parent`` whose forward can change nothing in ``parent``."""
    shadow = cls.__new__(cls)
    containers = dict, list, set
    vars(shadow).update({name: copy.copy(v) if isinstance(v, containers) else v for name, v in vars(parent).items()})
    vars(shadow)["_buffers"] = {name: None if b is None else b.clone() for name, b in parent._buffers.items()}
    vars(shadow)["training"] = training
    return shadow


def _holds_proxy(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, fx.Proxy) or (isinstance(value, list | set) and any(map(_holds_proxy, value)))


def _combined(parent: nn.Module, where: str, layers: set[nn.Module], graphs: list[fx.Graph]) -> _Reading:
    """What is the same in all ``graphs``."""
    found: dict[str, set[tuple[str, ...] | str]] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_module" and module_at(parent, node.target) in layers:
                found.setdefault(node.target, set()).add(_chain_from(node, parent))
            elif node.op == "call_function" and node.target in BATCH_NORMS and parent in layers:
                found.setdefault("", set()).add(_chain_from(node, parent))
    chains: Chains = {}
    notes: dict[nn.Module, str] = {}
    for path, results in found.items():
        layer, result = module_at(parent, path), next(iter(results))
        assert layer is not None
        if len(results) > 1:
            notes[layer] = f"computes no activation, as other things follow in {where} at other times"
        elif isinstance(result, str):
            notes[layer] = f"computes no activation, as {result} in {where}"
        else:
            chains[path] = result
            notes[layer] = f"computes {_name_of(module_at(parent, result[-1]))} at {result[-1]!r} in {where}"
    return _Reading(chains, notes)


def _chain_from(node: fx.Node, parent: nn.Module) -> tuple[str, ...] | str:
    """Returns the paths of the modules that read one after another up to an activation, or why that cannot be."""
    paths: list[str] = []
    while True:
        if len(node.users) != 1:
            return f"not one but {len(node.users)} read its output"
        (reader,) = node.users
        if reader.op != "call_module":
            return _why_not(reader)
        module = module_at(parent, str(reader.target))
        if reader.args != (node,) or reader.kwargs:
            return f"{_name_of(module)} reads its output, and more"
        paths.append(str(reader.target))
        if type(module) in PASSING or isinstance(module, PassingOn):
            return tuple(paths)
        if not returns_its_input(module):
            return f"{_name_of(module)} reads its output"
        node = reader


def _why_not(reader: fx.Node) -> str:
    if reader.op == "output":
        return "its output is returned"
    if reader.target in _SUMS:  # of what may not be there yet when the layer runs
        return "a sum reads its output, which only a layer that is called with a residual makes"
    return f"{getattr(reader.target, '__name__', reader.target)}, which is no module, reads its output"


def _name_of(module: nn.Module | None) -> str:
    cls = module.local_class if isinstance(module, PassingOn) else type(module)
    return cls.__name__ if cls.__module__.startswith("torch.nn.") else f"{cls.__module__}.{cls.__qualname__}"
