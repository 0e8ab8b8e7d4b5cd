"""Undocumented parts of torch that this package uses, all in one file.

===========================================  ================================  ========================================
Part, and what for                           Without it                        The public way
===========================================  ================================  ========================================
``_dynamo_marked_constant``: functions that  no compiled training over ranks   ``assume_constant_result``, which imports
the compiler runs and does not trace                                           the compiler, a second, in every process
``_functorch``, ``forward_ad``: is a         wrong derivatives there           none
transform, a dual level or a batch of
gradients active; dead wrappers
``Function.apply`` without its Python part   1.5 us more in each call          ``Function.apply``
``_current_graph_task_id``: does autograd    Repeatable cannot tell a          none
run a backward pass                          repetition from a first run
``checkpoint._checkpoint_hook``,             repetitions communicate and move  none; ``Repeatable`` around the function
``CheckpointFunction``, selective modes      statistics twice
``_DisableTorchDispatch``                    selective checkpoints see what    none
                                             a repetition leaves out
saved-tensor hooks in force, and whether     outputs are stored                none
they are allowed
the cell ``forward_call`` of                 recompute_outputs as a context    ``with recompute_outputs():``
``Module._call_impl``                        only
``_is_exporting_flag``                       a wrong error under torch.export  ``is_exporting``, true in torch 2.10 for
                                                                               all compilation
``OptimizedModule``, ``_compiled_call_impl`` compiled code outlives            none
                                             conversion
``_new_process_group_helper``, ``_world``    no group made by its members      ``new_group(use_local_synchronization=
                                             alone that can be made again      True)`` names groups by their ranks: the
                                                                               next one of the same ranks finds stale
                                                                               addresses in the store
options, backends, timeouts of a group       other time-outs than the user's   none
``_dump_nccl_trace_json``, ``uid``           the log names no call that a      none
                                             device waits in
``_c10d_functional``, names of groups        graphs would keep groups alive    ``torch.distributed.nn``, which does
``_allgather_base`` before torch 2.13        two more calls for a gather       ``all_gather_into_tensor``
``_composable.replicate``                    with_bagua needs a wrapper        ``DistributedDataParallel``
``_pytree``, ``_get_device_index``           nested batches, devices by        ``torch.utils.pytree`` of later versions
                                             number
===========================================  ================================  ========================================
"""

import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from threading import Lock
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.autograd import forward_ad
from torch.fx.proxy import TraceError
from torch.utils import _python_dispatch, _pytree, checkpoint

pytree: Any = _pytree

# The number of a device; the CPU is -1.
device_index: Callable[..., int] = _get_device_index

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Has torch.compile run ``function`` while it traces a call of it, and take the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def composable_replicate() -> Any:
    """Returns the module of torch's data parallelism in place, which a function of the same name hides."""
    return import_module("torch.distributed._composable.replicate")


def is_replicated_in_place(module: torch.nn.Module) -> bool:
    """Whether torch has made ``module`` data parallel in place."""
    composable = sys.modules.get("torch.distributed._composable.replicate")  # absent if never used
    return composable is not None and isinstance(module, composable.DDP)


has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Returns the level of forward-mode differentiation; -1 outside of it.
level_of_duals: Callable[[], Any] = partial(vars(forward_ad).get, "_current_level", -1)
# Whether a gradient is a batch of gradients, as autograd.grad(..., is_grads_batched=True) makes it.
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_dispatch_modes: Callable[[], list[Any]] = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)
_selective_modes = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
# Whether torch allows hooks for saved tensors here.
takes_saving_hooks: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]
_seen = nullcontext()

# Exceptions that end a forward pass and are no errors: a checkpoint has all the tensors that it repeats for, or
# torch.fx traces.
NO_ERRORS: tuple[type[Exception], ...] = (TraceError, getattr(checkpoint, "_StopRecomputationError", TraceError))


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Context in which tensors are real and writable by any op, even under inference mode or FakeTensorMode.

    A default device stays in force, so callers name the device.
    """
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        yield


def is_capturing() -> bool:
    """Whether this thread's current stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def group_named(name: str) -> Any:
    """Returns the process group named ``name``; compiled code holds names of groups."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._resolve_process_group(name)


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_exporting() -> bool:
    """Whether torch.export traces. torch.compiler.is_exporting is true in torch 2.10 for all compilation."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def forget_compiled_code(module: torch.nn.Module) -> None:
    """Makes the next call of a compiled model compile it anew, with its layers as they are now."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # absent unless something was compiled; imports in a second
    if dynamo is not None and any(
        part._compiled_call_impl is not None or isinstance(part, dynamo.OptimizedModule) for part in module.modules()
    ):
        # torch's guards would see that a layer has changed, but options of torch.compile can leave them out.
        torch.compiler.reset()


def in_place_of_forward(hook: FrameType, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has the call of a module, in which a forward pre-hook runs in the frame ``hook``, call ``wrap(forward)``.

    A forward hook cannot end what a pre-hook began: torch runs none if Ctrl-C ends the forward. An attribute of the
    module cannot stand for its forward either: copies and replicas of the module would call the first one's.
    """
    calls = hook.f_back and hook.f_back.f_back
    inner = calls and calls.f_locals.get("inner")  # in Module._call_impl, of torch 2.10 to 2.14
    cells = {} if inner is None else dict(zip(inner.__code__.co_freevars, inner.__closure__, strict=True))
    if "forward_call" not in cells:
        raise RuntimeError(
            "recompute_outputs: expected modules that are called as in torch 2.10 to 2.14, got torch "
            f"{torch.__version__}; enter recompute_outputs() as a context"
        )
    cells["forward_call"].cell_contents = wrap(cells["forward_call"].cell_contents)


def saving_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the pack and unpack hooks for saved tensors in force here; None if tensors are saved unchanged."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_transforming() -> bool:
    """Whether a transform of :mod:`torch.func` or forward-mode differentiation is active.

    False while torch.compile traces, which records the step that runs in training.
    """
    if torch.compiler.is_compiling():
        return False
    return has_transforms() or level_of_duals() >= 0


# Returns the tensor, or the tensor inside a wrapper that an ended transform left behind.
unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns a faster ``function.apply``, for :func:`unwrapped` tensors outside of transforms only.

    torch's own ``apply`` checks for transforms in each call and unwraps each argument.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def unseen_by_selective_checkpointing() -> AbstractContextManager[Any]:
    """Context hidden from selective checkpointing, which expects a repetition to repeat all ops that it has seen."""
    if torch.compiler.is_compiling():
        return _seen
    for mode in _dispatch_modes():
        if isinstance(mode, _selective_modes):
            return torch._C._DisableTorchDispatch()
    return _seen


def _knows_checkpoints() -> bool:
    """Whether torch.utils.checkpoint has the structure of torch 2.10 to 2.14, which this file relies on."""
    parts = (
        ("_checkpoint_hook", "__init__", ["self", "frame"]),
        ("_CheckpointFrame", "__init__", ["self", "recompute_fn"]),
        ("CheckpointFunction", "forward", ["ctx", "run_function", "preserve_rng_state"]),
    )
    for cls, method, expected in parts:
        function = getattr(getattr(checkpoint, cls, None), method, None)
        if function is None or list(inspect.signature(function).parameters)[: len(expected)] != expected:
            return False
    return True


has_known_checkpoints = _knows_checkpoints()


def observe_checkpoints(region: Callable[[], Any]) -> None:
    """Makes torch.utils.checkpoint, in both of its forms, enter a region of ``region()`` around functions that it runs.

    Each checkpoint has one region, for the first run and all repetitions, and holds it as long as it can repeat.
    """
    if not has_known_checkpoints:
        return

    class ObservedHook(checkpoint._checkpoint_hook):
        """Context around the first run with use_reentrant=False."""

        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            self.region = region()
            repeat = frame.recompute_fn
            frame.recompute_fn = self.region(repeat)

        def __enter__(self) -> None:
            super().__enter__()
            self.region.__enter__()

        def __exit__(self, *args: object) -> None:
            self.region.__exit__(*args)
            super().__exit__(*args)

    forward = checkpoint.CheckpointFunction.forward

    def observed_forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Runs the function with use_reentrant=True; backward calls the same wrapped function again."""
        return forward(ctx, region()(run_function), preserve_rng_state, *args)

    checkpoint._checkpoint_hook = ObservedHook  # type: ignore[misc]
    checkpoint.CheckpointFunction.forward = staticmethod(observed_forward)  # type: ignore[method-assign]


def raise_if_under_unknown_checkpoint() -> None:
    """Raises RuntimeError within a torch.utils.checkpoint that :func:`observe_checkpoints` does not know."""
    if has_known_checkpoints:
        return
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals is vars(checkpoint):
            raise RuntimeError(
                "torch.utils.checkpoint: expected the one of torch 2.10 to 2.14, in which synchronized layers can tell "
                f"what is repeated; got torch {torch.__version__}. Use a bagua_syncbn for this torch, or no activation "
                "checkpointing around synchronized layers"
            )


# Groups of torch.distributed, as in torch 2.13; parts that differ in torch 2.10 as there.

# torch 2.13 renamed this method of groups.
GATHER_METHOD = "all_gather_single" if hasattr(dist, "all_gather_single") else "_allgather_base"


def in_stream(kind: str) -> Any:
    """Returns options of kind ``"Allreduce"`` or ``"Allgather"`` by which NCCL takes the current stream, not its own.

    The functions of torch.distributed give the same ones, unless called with ``async_op``.
    """
    options = getattr(dist.distributed_c10d, f"{kind}Options")()
    options.asyncOp = False
    return options


def traced_all_gather(packed: torch.Tensor, size: int, group_name: str) -> torch.Tensor:
    """Returns the rows of all ranks, in a graph of torch.compile, which holds the group's name and not the group."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, size, group_name)
    rows: torch.Tensor = torch.ops._c10d_functional.wait_tensor(gathered).view(size, -1)
    return rows


def traced_all_reduce(packed: torch.Tensor, group_name: str) -> torch.Tensor:
    """Returns the sum over ranks, in a graph of torch.compile, see :func:`traced_all_gather`."""
    reduced = torch.ops._c10d_functional.all_reduce(packed, "sum", group_name)
    total: torch.Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
    return total


def prefix_store(prefix: str, store: Any) -> Any:
    """Returns ``store`` with ``prefix`` before each key."""
    return dist.distributed_c10d.PrefixStore(prefix, store)


def backend_and_store(group: Any) -> tuple[Any, Any]:
    """Returns the backend's name and the store of a live group."""
    return dist.distributed_c10d._world.pg_map[group]


def timeout_of(group: Any) -> timedelta:
    """Returns the time-out of collectives of ``group``; for a backend that has none, the time-out of its store."""
    timeouts = (options._timeout for options in _all_options(group))
    return next(timeouts, None) or backend_and_store(group)[1].timeout  # type: ignore[no-any-return]


def nccl_id(group: Any) -> str:
    """Returns the number of NCCL's part of ``group`` in torch's flight recorder; "" without NCCL."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == "nccl":
            return str(getattr(backend, "uid", ""))
    return ""


def nccl_progress(number: str) -> tuple[int, int]:
    """Returns how many collectives of the group with this :func:`nccl_id` were begun, and have ended, outside of CUDA
    graphs; zeros where torch does not know.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if not number or dump is None:
        return 0, 0
    status = json.loads(dump(False, False)).get("pg_status", {}).get(number, {})
    enqueued, completed = (int(status.get(f"last_{what}_collective", 0)) for what in ("enqueued", "completed"))
    return enqueued, max(completed, 0)


def is_gloo_on_cpu(group: Any) -> bool:
    """Whether gloo carries the CPU tensors of ``group``."""
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except (AttributeError, RuntimeError):  # no backend for CPU tensors, or a stand-in for a group
        return False


def device_of(world: Any) -> Any:
    """Returns the device that NCCL is bound to in the job with the default group ``world``; None for none."""
    return world.bound_device_id


def make_group(
    world: Any,
    ranks: Sequence[int],
    model: Any,
    store: Any,
    name: str,
    device: Any,
    splits: bool,
    backend: str | None = None,
) -> Any:
    """Returns a group that its ``ranks`` make, with the options and time-out of the group ``model``, and its backend
    unless another one is given.

    ``world`` is the default group of the job. If NCCL is bound to a ``device`` in it, and with ``splits``, the
    communicator is split off the job's communicator; otherwise a new one is made.
    """
    with _splitting(world, device, splits):
        group, _ = dist.distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(world.rank()),
            list(ranks),
            backend or backend_and_store(model)[0],
            store,
            name,  # type: ignore[arg-type]
            backend_options=None if backend else _nccl_options(model),
            timeout=timeout_of(model),
            device_id=device if splits else None,
            group_desc="bagua_syncbn",
        )
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


_binding = Lock()


@contextmanager
def _splitting(world: Any, device: Any, splits: bool) -> Iterator[None]:
    """Context in which torch splits new communicators off the job's if ``splits``, by binding the job to a device."""
    if device is None:
        yield
        return
    with _binding:
        world.bound_device_id = device if splits else None
        try:
            yield
        finally:
            world.bound_device_id = device


def _all_options(group: Any) -> list[Any]:
    backends = (group._get_backend(device) for device in group._device_types)
    options = (getattr(backend, "options", None) for backend in backends)  # some backends have none
    return [one for one in options if one is not None]


def _nccl_options(group: Any) -> Any:
    """Returns a copy of the options of NCCL in ``group``; None if ``group`` has no NCCL."""
    if not dist.is_nccl_available():
        return None
    for options in _all_options(group):
        if isinstance(options, dist.ProcessGroupNCCL.Options):
            options = copy.deepcopy(options)
            options.split_from = None  # type: ignore[assignment]
            return options
    return None
