"""The layers. They hold parameters, buffers and options, and call :mod:`.functional`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn
from torch.fx.proxy import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

from . import _ops as ops
from ._errors import notifies_peers
from ._groups import EVERYONE, ProcessGroupLike, spec_in_file, spec_of
from ._ops import Activation, activation_of
from ._ops.options import Options, options_of
from ._step.call import Call
from ._step.checks import check_dimensions, checked_options, named
from ._step.layer_state import LayerState
from ._torch.autograd import current_mode
from ._torch.modules import is_name_for_tracer
from .functional import batch_norm


class BatchNorm(_BatchNorm):
    """Local batch normalization over (N, C, \\*), with any number of dimensions.

    :func:`~bagua_syncbn.revert_sync_batchnorm` turns a :class:`SyncBatchNorm` into this class, because torch has no
    such layer.
    """

    _check_input_dim = staticmethod(check_dimensions)


def _peers_of(layer: "SyncBatchNorm", *_: Any, **__: Any) -> tuple[Any, Any] | None:
    # None for replicas: they run in threads, and cannot use process groups.
    return (layer._sync_state.group, layer) if layer.training and "_is_replica" not in vars(layer) else None


def _loading(set_state: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Returns a ``__setstate__`` that calls ``set_state``, and turns a file's plain data into objects."""

    def load(layer: Any, state: Any) -> None:
        set_state(layer, state)
        held = vars(layer)
        if isinstance(held.get("_sync_state"), dict):
            held["_sync_state"] = LayerState(**held["_sync_state"])
        if isinstance(held.get("group_before"), dict):  # the group of a converted torch.nn.SyncBatchNorm
            held["group_before"] = spec_in_file(held["group_before"])
        if type(held.get("fused_activation")) is tuple:
            held["fused_activation"] = Activation(*held["fused_activation"])

    return load


class SyncBatchNorm(_BatchNorm):
    r"""Batch normalization over (N, C, \*), synchronized across the ranks of a group.

    .. math::

        y = \mathrm{act}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \gamma + \beta + r\right)

    The activation and the residual :math:`r` are optional. In training, mean and variance are computed over the
    combined batch of all ranks, see :func:`~bagua_syncbn.sync_batch_norm`, which documents the options. In evaluation
    each rank normalizes with the running statistics, or with the statistics of its batch if
    ``track_running_stats=False``. Parameters, buffers and state dict are the same as in :class:`torch.nn.BatchNorm2d`.

    :class:`SyncBatchNorm1d`, :class:`SyncBatchNorm2d` and :class:`SyncBatchNorm3d` check the number of dimensions. Use
    :func:`~bagua_syncbn.convert_sync_batchnorm` for an existing model.

    The arguments up to ``track_running_stats``, ``device``, ``dtype`` and ``bias`` are those of
    :class:`torch.nn.BatchNorm2d`; without ``bias``, the layer has no :math:`\beta`. The options ``eps_mode``,
    ``skip_nonfinite`` and ``activation`` are also attributes. The attribute of the activation is
    ``fused_activation``, because converted classes may have a module named ``activation``.

    Args:
        process_group: ranks to synchronize with. A layer loaded from a file holds the ranks of the group instead of the
            group.

    Shape:
        - Input: (N, C, \*), float16, bfloat16, float32 or float64
        - Residual: same as the input, or None
        - Mask: bool, (N, 1, \*), where any dimension may be 1, or None
        - Output: same as the input, including the memory format

    Raises:
        TypeError, ValueError, RuntimeError: an argument is invalid, see :func:`~bagua_syncbn.sync_batch_norm`.
            ``fused_activation`` and ``process_group`` are checked when they are set, other attributes in the next call.
        AttributeError: ``activation`` is set instead of ``fused_activation``.

    Example::

        >>> layer = bagua_syncbn.SyncBatchNorm(64)
        >>> layer(torch.randn(8, 64, 14, 14)).shape
        torch.Size([8, 64, 14, 14])
        >>> layer = bagua_syncbn.SyncBatchNorm(64, activation="relu")
        >>> layer(torch.randn(8, 64, 14, 14), residual=torch.randn(8, 64, 14, 14)).shape
        torch.Size([8, 64, 14, 14])
    """

    eps_mode: str = "plus"
    skip_nonfinite: bool = False
    fused_activation: str | tuple[str, float] | nn.Module | None = None

    # Set by bagua_syncbn.conversion. Named as in torch and Bagua.
    convert_sync_batchnorm: ClassVar[Callable[..., Any]]

    # True if the class overrides __getattr__, which may return tensors other than the registered ones.
    _has_getattr: ClassVar[bool] = False

    # Class of the layer after revert_sync_batchnorm. Subclasses must define it.
    local_class: ClassVar[type[nn.Module]] = BatchNorm

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroupLike = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        eps_mode: str = "plus",
        skip_nonfinite: bool = False,
        activation: str | tuple[str, float] | nn.Module | None = None,
    ) -> None:
        spec = spec_of(process_group)
        options = checked_options(Options(eps, momentum, eps_mode, skip_nonfinite, activation), uses_batch=False)
        vars(self)["_sync_state"] = LayerState(spec)  # torch's constructor calls reset_running_stats, which reads it
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if affine and not bias:  # torch before 2.13 has no such argument
            self.register_parameter("bias", None)
        self.eps_mode = eps_mode
        self.skip_nonfinite = skip_nonfinite
        self.fused_activation = options.activation

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._has_getattr = cls.__getattr__ is not nn.Module.__getattr__
        cls.__setstate__ = _loading(cls.__setstate__)  # pyrefly: ignore[method-assign]
        if inspect.isfunction(vars(cls).get("forward")):
            cls.forward = notifies_peers(_peers_of)(cls.forward)  # pyrefly: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "fused_activation":
            value = activation_of(value)
        elif name == "training":
            if self._sync_state.frozen_mode is not None:
                self._sync_state.frozen_mode, value = value, False
            object.__setattr__(self, name, value)  # skips a microsecond of checks for tensors and modules
            return
        elif name == "activation" and type(self) in (SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d):
            raise AttributeError(f"activation: {type(self).__name__} has no such attribute; set fused_activation")
        super().__setattr__(name, value)

    @cached_property
    def _sync_state(self) -> LayerState:
        """State that other modules attach to the layer. Created lazily if the class was assigned by conversion."""
        return LayerState()

    @property
    def process_group(self) -> Any:
        """Ranks to synchronize with. The layer does not keep a :class:`torch.distributed.ProcessGroup` alive."""
        return spec_of(self._sync_state.group).process_group

    @process_group.setter
    def process_group(self, process_group: ProcessGroupLike) -> None:
        self._sync_state.group = spec_of(process_group)

    def reset_running_stats(self) -> None:
        if self._sync_state.frozen_mode is not None:
            raise RuntimeError(
                f"reset_running_stats: this {type(self).__name__} is frozen; call unfreeze_statistics first"
            )
        super().reset_running_stats()

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        if self.affine:
            nn.init.ones_(self.weight)
            if self.bias is not None:  # torch before 2.13 assumes a bias
                nn.init.zeros_(self.bias)

    _check_input_dim = staticmethod(check_dimensions)

    @notifies_peers(_peers_of)
    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        zero_masked: bool = False,
    ) -> Tensor:
        if isinstance(input, Tensor):
            try:
                self._check_input_dim(input)
            except ValueError as error:
                raise named(error, self) from None
        elif isinstance(input, Proxy):
            return as_one_node(self, input, (input, residual), {"mask": mask, "zero_masked": zero_masked})
        try:
            if self._has_getattr:
                raise KeyError
            # nn.Module.__getattr__ takes 0.6 us per tensor.
            parameters, held = self._parameters, self._buffers
            weight, bias = parameters["weight"], parameters["bias"]
            mean, var, batches = held["running_mean"], held["running_var"], held["num_batches_tracked"]
        except KeyError:  # also a parametrized layer, or a replica
            weight, bias = self.weight, self.bias
            mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        training, state = self.training, self._sync_state
        call = Call(
            input,
            weight,
            bias,
            residual,
            (mean, var, batches) if self.track_running_stats or not training else ops.NO_BUFFERS,
            options_of(self),
            training or (mean is None and var is None),
            state.group if training else None,
            self,
            current_mode(),
            None if mask is None and zero_masked is False else (mask, zero_masked),
        )
        return through_attachments(self, call) if state.attachments else batch_norm(call)

    def _replicate_for_data_parallel(self) -> "SyncBatchNorm":
        replica: SyncBatchNorm = super()._replicate_for_data_parallel()
        attachments = refuse_alone, *self._sync_state.attachments
        vars(replica)["_sync_state"] = replace(self._sync_state, attachments=attachments)
        return replica

    def extra_repr(self) -> str:
        text = super().extra_repr()  # with eps and momentum
        options = options_of(self)._replace(activation=activation_of(self.fused_activation))
        for name, value, default in zip(Options._fields, options, Options(), strict=True):
            text += f", {name}={value!r}" if f" {name}=" not in text and value != default else ""
        group = "" if self._sync_state.group is EVERYONE else f", process_group={self._sync_state.group}"
        frozen = "" if self._sync_state.frozen_mode is None else ", statistics frozen"
        return f"{text}{group}{frozen}"

    def _get_name(self) -> str:
        if is_name_for_tracer():
            raise TypeError(
                f"torch.fx: cannot trace {type(self).__name__} itself; trace a model that contains it, such as "
                "nn.Sequential(layer), where it becomes one node"
            )
        return super()._get_name()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if not isinstance(reduced[2], dict):  # returned by a subclass's __getstate__
            return reduced
        # Plain data: files contain only the layer's class. Without attachments and steps.
        state = {**reduced[2], "_sync_state": self._sync_state.plain()}
        if isinstance(state.get("fused_activation"), Activation):
            state["fused_activation"] = tuple(state["fused_activation"])
        return *reduced[:2], state, *reduced[3:]

    __setstate__ = _loading(_BatchNorm.__setstate__)

    def __prepare_scriptable__(self) -> NoReturn:
        # torch.jit.script replaces the layer in the model with the result, so the model would be unsynchronized.
        raise TypeError(
            f"torch.jit.script: cannot script {type(self).__name__}; script "
            "bagua_syncbn.revert_sync_batchnorm(copy.deepcopy(model))"
        )


# Functions instead of methods, because converted classes may have methods of any name.


def through_attachments(layer: SyncBatchNorm, call: Call) -> Tensor:
    """Runs ``call`` through the attachments of ``layer``."""
    go = batch_norm
    for attachment in layer._sync_state.attachments:
        go = partial(attachment, go)
    return go(call)


def refuse_alone(go: Callable[[Call], Tensor], call: Call) -> Tensor:
    """Attachment that raises in replicas without callbacks, which would train unsynchronized."""
    if call.group is not None:
        raise RuntimeError(
            f"{type(call.layer).__name__}: replicas of torch.nn.DataParallel cannot synchronize; use "
            "bagua_syncbn.data_parallel.DataParallelWithCallback, or call patch_replication_callback on the wrapper"
        )
    return go(call)


def as_one_node(layer: nn.Module, proxy: Proxy, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns a torch.fx graph node that calls ``layer``, as torch.fx does by default for ``torch.nn`` layers.

    torch.fx cannot trace synchronized layers: they branch on the input, and their calls depend on the job.
    """
    tracer: Any = proxy.tracer
    node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(layer), tuple(args), dict(kwargs))
    return node


class SyncBatchNorm1d(nn.BatchNorm1d, SyncBatchNorm):
    """:class:`SyncBatchNorm` for 2-D or 3-D input, (N, C) or (N, C, L)."""

    local_class = nn.BatchNorm1d


class SyncBatchNorm2d(nn.BatchNorm2d, SyncBatchNorm):
    """:class:`SyncBatchNorm` for 4-D input, (N, C, H, W)."""

    local_class = nn.BatchNorm2d


class SyncBatchNorm3d(nn.BatchNorm3d, SyncBatchNorm):
    """:class:`SyncBatchNorm` for 5-D input, (N, C, D, H, W)."""

    local_class = nn.BatchNorm3d
