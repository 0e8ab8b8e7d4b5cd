"""Cases of the contract: a layer on several ranks, compared with the formula in one process."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn._ops.options import options_of
from bagua_syncbn.data_parallel import DataParallelWithCallback
from tests.helpers import formula
from tests.helpers.checkpoints import CHECKPOINTED
from tests.helpers.options import attributes
from tests.helpers.tolerances import TOLERANCES, assert_close
from tests.helpers.user_layers import BatchNormAct
from tests.helpers.workers import forget_compilations


@dataclass(frozen=True)
class Case:
    """A layer on ``len(splits)`` ranks."""

    splits: tuple[int, ...]  # batch size of each rank
    shape: tuple[int, ...]  # (C, *)
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype | None = None  # None: dtype
    layout: str = "contiguous"  # see laid_out
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the layer
    way: str = "forward"  # key of WAYS: how the layer is called
    checkpoint: str = ""  # key of CHECKPOINTED; the layer is changed before backward recomputes the call
    frozen: tuple[str, ...] = ()  # a subset of "input", "weight", "bias", "statistics"
    residual: bool = False
    masks: str = ""  # "random" or "padded rank"
    zero_masked: bool = False  # input, residual and output gradient are NaN at masked positions
    spoiled: bool = False  # the last training step has an infinite value
    evaluates: bool = False  # the last step is in evaluation mode
    order: int = 1  # highest order of derivatives
    steps: int = 2
    mean: float = 1.0
    std: float = 2.0

    def layer(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        dtype = self.parameter_dtype or self.dtype
        layer = make_layer(self.way, self.shape[0], dtype=dtype, **self.options)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(self.shape[0], generator=generator))
            for name, buffer in list(layer.named_buffers())[:2]:  # not of num_batches_tracked
                # Positive like the batch means, which would cancel negative values.
                buffer.copy_(torch.rand(self.shape[0], generator=generator) * 4)
                if self.layout == "sliced":
                    setattr(layer, name, laid_out(buffer, "sliced"))
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return bagua_syncbn.freeze_statistics(layer) if "statistics" in self.frozen else layer

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns input, residual and output gradient of the whole batch."""
        generator = torch.Generator().manual_seed(100 + step)
        size = (sum(self.splits), *self.shape)
        channel = torch.linspace(-1, 1, self.shape[0]).view(-1, *[1] * (len(self.shape) - 1))
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        input = values * self.std * (1 + channel / 2) + self.mean + channel
        if self.spoiled and step == self.last_in_training:
            input.view(-1)[0] = torch.inf
        residual, grad_output = (torch.randn(size, generator=generator) for _ in range(2))
        return input.to(self.dtype), residual.to(self.dtype), grad_output.to(self.dtype)

    def mask(self, step: int) -> Tensor | None:
        """Returns the mask of the whole batch, or None."""
        generator, samples = torch.Generator().manual_seed(200 + step), sum(self.splits)
        if not self.masks:
            return None
        mask = torch.rand(samples, 1, *self.shape[1:], generator=generator) < 0.5
        if self.masks == "padded rank":
            mask[self.splits[0] :] = False
        return with_other_bytes(mask)

    @property
    def last_in_training(self) -> int:
        return self.steps - 1 - self.evaluates

    def trains(self, step: int) -> bool:
        return step <= self.last_in_training


# Pairs of shape and layout.
SHAPES_IN_LAYOUTS = [
    ((7, 5), "contiguous"),
    ((3, 4, 33), "transposed"),
    ((2, 16, 5, 6), "channels_last"),
    ((2, 3, 5, 6), "sliced"),
    ((2, 8, 3, 4, 5), "channels_last_3d"),
]


def with_other_bytes(mask: Tensor) -> Tensor:
    """Returns ``mask`` with any byte but 0 for True, as in a uint8 mask that is viewed as bool."""
    places = torch.arange(mask.numel(), device=mask.device).view_as(mask)
    return (mask * (255 - places % 255)).to(torch.uint8).view(torch.bool)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns a copy of ``tensor`` in a memory layout: that of a memory format, "transposed" or "sliced"."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":  # strided in every dimension, with a storage offset
        wide = tensor.new_zeros([2 * size + 1 for size in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    memory_format: torch.memory_format = torch.contiguous_format if layout == "contiguous" else getattr(torch, layout)
    return tensor.contiguous(memory_format=memory_format)


class BySuper(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


CLASSES: dict[str, Callable[..., Any]] = {
    "super": BySuper,
    "own F.batch_norm": partial(BatchNormAct, act_layer=nn.Identity),
}


def make_layer(way: str, channels: int, **options: Any) -> Any:
    if way not in CLASSES:
        return bagua_syncbn.SyncBatchNorm(channels, **options)
    of_torch = {name: options.pop(name) for name in inspect.signature(nn.BatchNorm2d).parameters if name in options}
    layer = bagua_syncbn.convert_sync_batchnorm(CLASSES[way](channels, **of_torch))
    for name, value in attributes(options).items():
        setattr(layer, name, value)
    return layer


def as_function(layer: Any) -> Callable[..., Tensor]:
    def call(input: Tensor, **given: Any) -> Tensor:
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return bagua_syncbn.sync_batch_norm(
            *(input, *tensors, layer.training),
            process_group=layer.process_group,
            num_batches_tracked=layer.num_batches_tracked if layer.training else None,
            **options_of(layer)._asdict(),
            **given,
        )

    return call


def compiled(layer: Any) -> Callable[..., Tensor]:
    forget_compilations()
    return torch.compile(layer, backend="eager", fullgraph=True)  # type: ignore[no-any-return]


def within(context: Callable[[Any], Any]) -> Callable[[Any], Callable[..., Tensor]]:
    def way(layer: Any) -> Callable[..., Tensor]:
        def call(input: Tensor, **given: Any) -> Tensor:
            with context(layer):
                return layer(input, **given)  # type: ignore[no-any-return]

        return call

    return way


WAYS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "forward": lambda layer: layer,
    "function": as_function,
    "super": lambda layer: layer,
    "own F.batch_norm": lambda layer: layer,
    "compiled": compiled,
    "checkpointed": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "accumulated": within(bagua_syncbn.accumulate_statistics),
    "recomputed": within(lambda layer: bagua_syncbn.recompute_outputs()),
    "replicas": lambda layer: DataParallelWithCallback(layer, device_ids=["cpu", "cpu"]),
}


def call_of(case: Case, layer: Any) -> Callable[..., Tensor]:
    """Returns a function of input, residual and mask."""
    way = WAYS[case.way](layer)
    if case.checkpoint:
        way = CHECKPOINTED[case.checkpoint](layer, way)

    def call(input: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
        given: dict[str, Any] = {} if residual is None else {"residual": residual}
        if mask is None:
            return way(input, **given)
        if case.way not in CLASSES:
            return way(input, **given, mask=mask, zero_masked=case.zero_masked)
        with bagua_syncbn.masked(layer, mask, zero_masked=case.zero_masked):
            return way(input, **given)

    return call


def leaves_of(case: Case, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns input, residual if there is one, and output gradient by name, for autograd to differentiate."""
    named = zip(("input", "residual", "grad_output"), tensors, strict=True)
    return {
        name: tensor.detach().requires_grad_(name not in case.frozen)
        for name, tensor in named
        if name != "residual" or case.residual
    }


def derivatives(loss: Tensor, ranks: Sequence[dict[str, Tensor]], first: int, order: int) -> list[dict[str, Tensor]]:
    """Returns the derivatives of each rank by name, up to ``order``.

    The loss of each order is a random sum of the previous order's derivatives. ``first`` is the number of the first
    rank, which seeds the random numbers.
    """
    found: list[dict[str, Tensor]] = [{} for _ in ranks]
    wanted = [tensor for tensors in ranks for tensor in tensors.values() if tensor.requires_grad]
    for derivative in range(1, order + 1):
        if derivative < order:
            gradients = iter(torch.autograd.grad(loss, wanted, create_graph=True, materialize_grads=True))
        else:  # reentrant checkpoints require ``backward``
            loss.backward()
            gradients = iter([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in wanted])
        loss = torch.zeros((), requires_grad=True)  # even if no gradient depends on a leaf
        for rank, tensors in enumerate(ranks):
            generator = torch.Generator().manual_seed(100 * derivative + first + rank)
            for name in (name for name, tensor in tensors.items() if tensor.requires_grad):
                gradient = next(gradients)
                found[rank][f"{derivative}. derivative by {name}"] = gradient.detach()
                loss = loss + (gradient * torch.randn(gradient.shape, generator=generator).to(gradient)).sum()
    for leaf in wanted:
        leaf.grad = None
    return found


def run_rank(case: Case, process_group: Any = None, rank: int | None = None) -> dict[str, Any]:
    """Runs ``case`` on this rank. Returns outputs and derivatives of each step, and the final buffers."""
    rank = dist.get_rank() if rank is None else rank
    own = slice(sum(case.splits[:rank]), sum(case.splits[: rank + 1]))
    layer, steps = case.layer(), []
    layer.process_group = process_group
    call = call_of(case, layer)
    for step in range(case.steps):
        layer.train(case.trains(step))
        mask, tensors = case.mask(step), [laid_out(whole[own], case.layout) for whole in case.batch(step)]
        if mask is not None:
            mask = mask[own]
            if case.zero_masked:
                tensors = [tensor.masked_fill(~mask, torch.nan) for tensor in tensors]
        leaves = leaves_of(case, tensors)
        with bagua_syncbn.recompute_outputs() if case.way == "recomputed" else nullcontext():
            output = call(leaves["input"], leaves.get("residual"), mask)
            loss = (output * leaves["grad_output"]).sum()  # saves the output
        assert output.dtype == case.dtype
        if case.layout not in ("transposed", "sliced") and output.numel():  # F.batch_norm makes them contiguous
            assert output.stride() == leaves["input"].stride()
        wanted = leaves | dict(layer.named_parameters())
        steps.append({"output": output.detach()} | derivatives(loss, [wanted], rank, case.order)[0])
    return {"steps": steps, "buffers": dict(layer.named_buffers())}


def run_ranks(cases: Sequence[Case]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        try:
            results.append(run_rank(case))
        except Exception as error:
            raise AssertionError(f"{case} raised") from error
    return results


FUNCTIONS = {"identity": nn.Identity(), "gelu_tanh": partial(nn.functional.gelu, approximate="tanh")}


_EXPECTED: dict[str, list[dict[str, Any]]] = {}  # several kinds of groups and kernels run the same cases


def run_reference(case: Case) -> list[dict[str, Any]]:
    """Returns the expected results of each rank, computed once per case."""
    if repr(case) not in _EXPECTED:
        _EXPECTED[repr(case)] = _compute_reference(case)
    return _EXPECTED[repr(case)]


def _compute_reference(case: Case) -> list[dict[str, Any]]:
    """Runs ``case`` in one process on the whole batch, in float64.

    Each rank has a copy of the parameters, so the gradients of a copy are this rank's share.
    """
    layer = case.layer().double()
    vars(layer).update(case.options)  # even if the constructor ignored one
    parameters, size = dict(layer.named_parameters()), len(case.splits)
    results: list[dict[str, Any]] = [{"steps": [], "buffers": dict(layer.named_buffers())} for _ in case.splits]
    for step in range(case.steps):
        tensors, mask = [tensor.double() for tensor in case.batch(step)], case.mask(step)
        valid = torch.ones_like(tensors[0][:, :1], dtype=torch.bool) if mask is None else mask
        if case.zero_masked:
            tensors = [tensor.where(valid, 0) for tensor in tensors]
        ranks = [
            leaves_of(case, own)
            | {name: value.detach().requires_grad_(name not in case.frozen) for name, value in parameters.items()}
            for own in zip(*(tensor.split(case.splits) for tensor in tensors), strict=True)
        ]
        whole = {name: torch.cat([own[name] for own in ranks]) for name in ranks[0] if name not in parameters}
        statistics = layer.running_mean, layer.running_var
        if case.trains(step) and "statistics" not in case.frozen:
            values = formula.values_of(whole["input"], valid)
            statistics = formula.moments(values)
            if layer.track_running_stats:
                formula.move(layer, values.detach(), layer.skip_nonfinite)
        output = formula.normalize(whole["input"], layer.eps_mode, layer.eps, *statistics)
        of_rank = torch.arange(size).repeat_interleave(torch.tensor(case.splits))  # the rank of each sample
        weight, bias = (
            torch.stack([own[name] for own in ranks])[of_rank].view(-1, case.shape[0], *[1] * (output.dim() - 2))
            if name in parameters
            else default
            for name, default in (("weight", 1), ("bias", 0))
        )
        output = output * weight + bias + whole.get("residual", 0)
        if activation := case.options.get("activation"):  # a name, or a name and a parameter
            name, *arguments = [activation] if isinstance(activation, str) else activation
            output = (FUNCTIONS.get(name) or getattr(nn.functional, name))(output, *arguments)
        output = output.where(valid, 0) if case.zero_masked else output
        found = derivatives((output * whole["grad_output"]).sum(), ranks, 0, case.order)
        for result, own_output, own in zip(results, output.detach().split(case.splits), found, strict=True):
            result["steps"].append({"output": own_output} | own)
    return results


def check(pool: Any, *cases: Case) -> None:
    """Compares cases that have the same number of ranks with one process. If ``pool`` is None, runs a single rank in
    this process."""
    size = len(cases[0].splits)
    ranks = pool.run(run_ranks, size, cases) if pool else [[run_rank(case, rank=0) for case in cases]]
    for case, *results in zip(cases, *ranks, strict=True):
        compare(case, results)


def compare(case: Case, results: Sequence[dict[str, Any]], also: float = 0.0) -> None:
    """Compares the results of all ranks with one process. ``also`` is an additional tolerance for outputs and
    derivatives."""
    expected = run_reference(case)
    is_rounded_twice = case.residual or "activation" in case.options
    roundings = 100 if case.order > 1 else 4 if is_rounded_twice else 1
    for rank, (own, wanted) in enumerate(zip(results, expected, strict=True)):
        for step, (values, references) in enumerate(zip(own["steps"], wanted["steps"], strict=True)):
            assert values.keys() == references.keys()
            if case.spoiled and step == case.last_in_training:
                continue
            for name, value in values.items():
                what, rtol = f"{name} of rank {rank} at step {step} of {case}", TOLERANCES[value.dtype][0] * roundings
                message = partial("{}: {}".format, what)
                torch.testing.assert_close(value.double(), references[name], rtol=rtol, atol=rtol + also, msg=message)
    first, wanted = results[0]["buffers"], expected[0]["buffers"]
    assert first.keys() == wanted.keys()
    for name, value in first.items():
        assert all(torch.equal(own["buffers"][name], value) for own in results), f"{name} differs between ranks"
        if name != "num_batches_tracked":
            assert_close(value, wanted[name], f"{name} of {case}", roundings=1 + case.steps)
        elif not (case.spoiled and case.way == "own F.batch_norm"):  # custom forwards count batches
            assert value == wanted[name], f"{name} of {case}"
