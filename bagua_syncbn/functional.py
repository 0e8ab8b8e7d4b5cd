"""Synchronized batch normalization as a function: checks a call and chooses its step."""

import inspect
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import _ops as ops
from ._errors import notifies_peers
from ._groups import LOCAL, Communicator, ProcessGroupLike, spec_of
from ._groups import spec as specs
from ._ops.options import Options
from ._step.by_torch import Evaluation, LocalStep
from ._step.call import Call
from ._step.checks import check_flag, check_tensors, check_tracer, checked_options, named
from ._step.exchange import Exchange
from ._step.hooks import hooks
from ._step.layer_state import LayerState
from ._step.masks import masking_of
from ._step.steps import CompiledStep, RankStep, Step, TransformedStep
from ._torch.autograd import as_number, current_mode, is_fake, is_recorded, is_without_data

_PLAIN_CLASSES = Tensor, nn.Parameter


def make_plain_exchange(call: Call, options: Options, communicator: Communicator) -> Exchange:
    """Returns the exchange of a call and of later calls with the same step."""
    if call.mode == "compiled":
        as_number(call.input.size(1))  # makes the size a constant: backward cannot take a symbolic size
    return Exchange(communicator)


make_exchange: Callable[[Call, Options, Communicator], Exchange] = make_plain_exchange
"""Returns the exchange for several ranks. Set by ``_reliability``."""

compute_special: Callable[[Call], Tensor | None] = lambda call: None  # noqa: E731
"""Computes calls with inputs of special classes, such as DTensor; returns None for others. Set by ``statistics``."""

first_call_checks: list[Callable[[Call], bool]] = []
"""Checks of a call for which no step is kept. If one returns False, the call's step is not kept either."""


def _peers_of_call(*args: Any, **options: Any) -> tuple[Any, Any] | None:
    """Returns the group and layer of a :func:`sync_batch_norm` call; the arguments may be invalid."""
    given = dict(zip(inspect.signature(sync_batch_norm).parameters, args, strict=False)) | options
    return (given.get("process_group"), given.get("layer")) if given.get("training", True) else None


@notifies_peers(_peers_of_call)
def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    process_group: ProcessGroupLike = None,
    *,
    num_batches_tracked: Tensor | None = None,
    eps_mode: str = "plus",
    skip_nonfinite: bool = False,
    layer: nn.Module | None = None,
    activation: str | tuple[str, float] | nn.Module | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    zero_masked: bool = False,
) -> Tensor:
    r"""Computes batch normalization with the statistics of all ranks of a group.

    .. math::

        y = \mathrm{act}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \gamma + \beta + r\right)

    The activation and the residual :math:`r` are optional.

    With ``training=True``, mean and biased variance are computed per channel over the combined batch of all ranks.
    Output, gradients and running statistics equal a single process on the concatenated batch (`Ioffe and Szegedy, 2015
    <https://arxiv.org/abs/1502.03167>`__; merge of the moments: Chan, Golub and LeVeque, 1983). The gradients of
    ``weight`` and ``bias`` are this rank's share of the sum over ranks. Forward does one all-gather (from 32 ranks on,
    except for float64, one all-reduce) and, if ``input`` requires a gradient, backward one all-reduce; all ranks of the
    group must make the call. Batch sizes may differ between ranks, and may be 0.

    With ``training=False``, the result equals :func:`torch.nn.functional.batch_norm` with the running statistics. No
    rank communicates.

    Forward saves ``input`` and, with an activation, ``residual``; backward recomputes the input of the activation.
    Gradients are exact and can be differentiated again.

    Args:
        input: (N, C, \*), float16, bfloat16, float32 or float64, in any memory format; or a DTensor, with the
            statistics of the whole tensor.
        running_mean: (C), any float dtype, not expanded in training. Pass None here and for ``running_var`` to track
            nothing in training. Updated in place if all ranks together have at least two values per channel.
        running_var: (C), updated like ``running_mean``, with the unbiased variance.
        weight: (C), :math:`\gamma`, any float dtype; None for 1.
        bias: (C), :math:`\beta`, any float dtype; None for 0.
        training: whether to normalize with batch statistics.
        momentum: weight of the new batch statistics in the running statistics; None for a cumulative average, which
            requires ``num_batches_tracked``. Like ``eps``, a number or a CPU tensor without dimensions.
        eps: :math:`\epsilon`, added to the variance. At least 0; above 0 in training.
        process_group: ranks to synchronize with, see :data:`~bagua_syncbn.ProcessGroupLike`. None for the job's default
            group, or for this process if no job runs.
        num_batches_tracked: scalar, any integer or float dtype. Incremented in place with the running statistics.
        eps_mode: ``"plus"``; or ``"clamp"`` to divide by :math:`\sqrt{\max(\mathrm{Var}[x], \epsilon)}`, where
            ``eps`` may be 0 in training. With float32 and half inputs, "clamp" is exact for standard deviations down to
            1e-19, and its second derivatives down to 1e-12; smaller deviations need float64 input or ``eps`` above 0.
        skip_nonfinite: whether to skip the update of the buffers if the batch statistics are infinite or NaN, as in a
            step that ``GradScaler`` skips. The host does not wait for this decision.
        layer: calling module. Activation checkpointing matches recomputed calls by module and order; all calls without
            a module are treated as calls of one module.
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"elu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``,
            ``"hardswish"``, ``"sigmoid"``, ``"tanh"`` or ``"mish"``, see :mod:`torch.nn.functional`; a pair with the
            slope of ``leaky_relu`` or the alpha of ``elu``, such as ``("leaky_relu", 0.2)``; a module such as
            ``nn.ReLU()``; or None.
        residual: :math:`r`, (N, C, \*), same dtype and device as ``input``, in any memory format; or None.
        mask: bool, (N, 1, \*); dimensions of size 1 broadcast. True for positions that the statistics include. All
            other positions are normalized with the same statistics. Some ranks may pass no mask, and a rank may mask
            all of its positions.
        zero_masked: whether output and gradient are 0 at masked positions, even if the input is NaN there.

    Returns:
        (N, C, \*), with the dtype and memory format of ``input``.

    Raises:
        TypeError: an argument has the wrong type, dtype or layout; a tensor is a DTensor and ``input`` is not, or
            their placements do not match; a DTensor ``input`` comes with a mask.
        ValueError: an argument has a wrong value or number of dimensions; ``mask`` does not fit ``input``; a
            single-rank training call has one value per channel; this rank is not in ``process_group``, or the ranks of
            the group do not hold each value of a DTensor exactly once.
        RuntimeError: a tensor has the wrong number of elements or is on another device; a running statistic is an
            expanded tensor in training; ``process_group`` is a mesh of several dimensions; :func:`torch.jit.trace` or
            ``torch.export`` traces training over several ranks; a checkpoint recomputes more calls than it ran.

    These errors are raised before any buffer changes and, except in a group's first use, before this rank waits for its
    peers. See docs/reliability.md for ranks that make different calls.
    """
    if training is not True:
        check_flag("training", training)
    if isinstance(activation, (nn.Module, list)):  # may change before the next call, unlike a kept value
        activation = ops.activation_of(activation)
    buffers = running_mean, running_var, num_batches_tracked
    options = Options(eps, momentum, eps_mode, skip_nonfinite, activation)
    given_mask = None if mask is None and zero_masked is False else (mask, zero_masked)
    group = spec_of(process_group) if training else None
    mode = current_mode()
    return batch_norm(Call(input, weight, bias, residual, buffers, options, training, group, layer, mode, given_mask))


def batch_norm(call: Call) -> Tensor:
    """Computes :func:`sync_batch_norm`. The caller notifies peers of errors."""
    if type(call.input) not in _PLAIN_CLASSES:
        input, mode = call.input, call.mode
        output = compute_special(call)
        if output is not None:
            return output
        if is_fake(input) and mode == "eager":  # outside of its FakeTensorMode
            call = call._replace(mode="dispatched")
        elif isinstance(input, Tensor) and mode != "compiled":
            if has_torch_function_unary(input):
                # The output gets the input's class, and the attributes that this class copies.
                compute_plain = lambda plain: batch_norm(call._replace(input=plain))  # noqa: E731
                return handle_torch_function(compute_plain, (input,), input)
            # The class has no __torch_function__, or torch has disabled it (inside another __torch_function__).
            if type(input).__torch_dispatch__ is Tensor.__torch_dispatch__:
                return batch_norm(call._replace(input=input.as_subclass(Tensor)))
    if call.mode != "compiled" and (hooks.prepare is not None or hooks.see_output is not None):
        return _hooked(call)
    norm = step_of(call).prepare(call)
    return norm.step.finish(call, norm)


def _hooked(call: Call) -> Tensor:
    """Computes ``call`` with the thread's hooks."""
    prepare = lambda: step_of(call).prepare(call)  # noqa: E731
    norm = prepare() if hooks.prepare is None else hooks.prepare(call, prepare)
    output: Tensor = norm.step.finish(call, norm)
    if hooks.see_output is not None:
        hooks.see_output(output, *call[:4], norm)
    return output


# Keeps the steps of calls without a layer.
_NO_LAYER = LayerState()
_MOST_STEPS = 256


def step_of(call: Call) -> Step:
    """Returns the kept step that fits ``call``, or else checks the call and chooses a step.

    The key contains what checks and the choice depend on, except for values and masks. The layer's options and tensors
    may change in any way between calls, so they are compared in each call.

    Raises:
        TypeError, ValueError, RuntimeError: a tensor or an option is wrong, see :func:`sync_batch_norm`.
    """
    input, weight, bias, residual, (mean, var, batches), options, uses_batch, group, layer, mode, _, accumulate = call
    if mode != "eager":
        return _choose(call)
    job, members = (None, None) if group is None else (specs.world(), group.identity)
    try:
        state: LayerState = (
            _NO_LAYER
            if layer is None
            else layer.__dict__.get("_sync_state") or layer.__dict__.setdefault("_sync_state", LayerState())
        )
        key = (
            (group is None, input.shape[1]),
            options, uses_batch, members, specs.replacement,
            None if job is None else ref(job),  # after the job's end, it equals no reference to another
            accumulate is None, mean is var,
            layer.__class__, getattr(layer, "momentum", 0), state.origin,
            input.__class__, input.dtype, input.device, input.layout,
            residual is None
            or (residual.__class__, residual.dtype, residual.device, residual.layout, residual.shape == input.shape),
            weight is None or (weight.__class__, weight.dtype, weight.device, weight.shape),
            bias is None or (bias.__class__, bias.dtype, bias.device, bias.shape),
            mean is None or (mean.__class__, mean.dtype, mean.device, mean.shape, mean.stride()),
            var is None or (var.__class__, var.dtype, var.device, var.shape, var.stride()),
            batches is None or (batches.__class__, batches.dtype, batches.device, batches.shape),
        )  # fmt: skip
        step = state.steps.get(key[0])
        if step is not None and step.key == key:
            return step
    except (AttributeError, IndexError, RuntimeError, ValueError):  # an invalid tensor, or an option that is an array
        return _choose(call)
    step = _choose(call, key)
    if step.key is not None:
        if len(state.steps) >= _MOST_STEPS:
            state.steps.clear()
        state.steps[key[0]] = step
    return step


def _choose(call: Call, key: tuple[Any, ...] | None = None) -> Step:
    """Checks ``call`` and returns a step with this ``key``, or with None if the step must not be kept."""
    try:
        return _checked(call, key)
    except (TypeError, ValueError, RuntimeError) as error:
        raise named(error, call.layer) from None


def _checked(call: Call, key: tuple[Any, ...] | None) -> Step:
    input, group, layer, mode = call.input, call.group, call.layer, call.mode
    mean, var, counter = call.buffers
    check_tensors(call[:4], call.buffers, call.uses_batch, layer)
    has_data = not is_without_data(input)
    if not has_data or not (is_recorded() or all(check(call) for check in first_call_checks)):
        key = None
    options = checked_options(call.options, call.uses_batch)
    if any(isinstance(option, Tensor) for option in call.options):  # its value may change before the next call
        key = None
    if not call.uses_batch:
        if mean is None or var is None:
            raise ValueError("running_mean, running_var: expected tensors with training=False, got None")
        return Evaluation(call, options, key)
    if mode != "compiled" and call.mask is not None:
        masking_of(input, call.mask)  # raises before this rank waits for peers to create the group
    if group is not None:
        check_tracer(group, input)
    if options.momentum is None and mean is not None and counter is None:
        raise ValueError("num_batches_tracked: expected a tensor, because momentum is None; got None")
    communicator = LOCAL if group is None or not has_data else spec_of(group).communicator()
    is_local = communicator.size == 1
    exchange = (make_plain_exchange if is_local else make_exchange)(call, options, communicator)
    kinds: dict[str, type[RankStep]] = {"compiled": CompiledStep, "transformed": TransformedStep}
    step = kinds.get(mode, RankStep)(options, exchange, key)
    return LocalStep(call, options, step) if is_local and has_data else step
