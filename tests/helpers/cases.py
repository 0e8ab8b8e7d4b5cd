"""Cases of the contract: what ranks compute, by any way into the layer, and what one process gives by the formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn.data_parallel import DataParallelWithCallback
from bagua_syncbn.ops.activations import activation_of
from tests.helpers.checkpoints import CHECKPOINTED
from tests.helpers.tolerances import TOLERANCES, assert_close
from tests.helpers.user_layers import BatchNormAct
from tests.helpers.workers import forget_compilations


@dataclass(frozen=True)
class Case:
    """One layer over ``len(splits)`` ranks, for ``steps`` steps."""

    splits: tuple[int, ...]  # batch size of each rank
    shape: tuple[int, ...]  # (C, *)
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype | None = None  # None: as dtype
    layout: str = "contiguous"
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the layer
    way: str = "forward"  # among WAYS
    checkpoint: str = ""  # among CHECKPOINTED: what repeats the call in backward, when all else has changed
    frozen: tuple[str, ...] = ()  # among "input", "weight", "bias"; "statistics" too
    residual: bool = False
    masks: str = ""  # "random", "padded rank", "nothing", "lengths"
    zero_masked: bool = False  # ranks then have NaN at masked positions
    spoiled: bool = False  # one value of the last step in training is infinite
    evaluates: bool = False  # the last step is in evaluation
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
            for buffer in (layer.running_mean, layer.running_var):
                if buffer is not None:  # positive, as the batches' means are: they would cancel a negative one
                    buffer.copy_(torch.rand(self.shape[0], generator=generator) * 4)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return bagua_syncbn.freeze_statistics(layer) if "statistics" in self.frozen else layer

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns input, residual and grad_output of all ranks together, in ``dtype``."""
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
        """Returns the mask of all ranks together, or the lengths; None if there is none."""
        generator, samples = torch.Generator().manual_seed(200 + step), sum(self.splits)
        if not self.masks:
            return None
        if self.masks == "lengths":
            return torch.randint(0, self.shape[-1] + 1, (samples,), generator=generator)
        mask = torch.rand(samples, 1, *self.shape[1:], generator=generator) < 0.5
        if self.masks == "padded rank":
            mask[self.splits[0] :] = False
        return mask & (self.masks != "nothing")

    @property
    def last_in_training(self) -> int:
        return self.steps - 1 - self.evaluates

    def trains(self, step: int) -> bool:
        return step <= self.last_in_training


# Shapes, each in a layout that :func:`laid_out` takes.
SHAPES_IN_LAYOUTS = [
    ((7, 5), "contiguous"),
    ((3, 4, 33), "transposed"),
    ((2, 16, 5, 6), "channels_last"),
    ((2, 3, 5, 6), "sliced"),
    ((2, 8, 3, 4, 5), "channels_last_3d"),
]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns a tensor of the same values in the given layout."""
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "channels_last_3d":
        return tensor.contiguous(memory_format=torch.channels_last_3d)
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":  # strided in every dimension, and not at the start of its storage
        wide = tensor.new_zeros([2 * size + 1 for size in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        view.copy_(tensor)
        return view
    raise ValueError(f"layout: got {layout!r}")


class BySuper(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class ByFunction(BatchNormAct):
    """As timm writes it: torch's forward, with F.batch_norm; here with nothing after it."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.act = nn.Identity()


CLASSES = {"super": BySuper, "own F.batch_norm": ByFunction}


def make_layer(way: str, channels: int, **options: Any) -> Any:
    if way not in CLASSES:
        return bagua_syncbn.SyncBatchNorm(channels, **options)
    eps_mode, activation = options.pop("eps_mode", "plus"), options.pop("activation", None)
    skips = options.pop("skip_nonfinite", False)
    layer = bagua_syncbn.convert_sync_batchnorm(CLASSES[way](channels, **options), skip_nonfinite=skips)
    layer.eps_mode, layer.fused_activation = eps_mode, activation
    return layer


def as_function(layer: Any) -> Callable[..., Tensor]:
    def call(input: Tensor, **given: Any) -> Tensor:
        is_training = layer.training
        tracked = layer.num_batches_tracked if is_training else None
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return bagua_syncbn.sync_batch_norm(
            *(input, *tensors, is_training, layer.momentum, layer.eps, layer.process_group),
            eps_mode=layer.eps_mode,
            skip_nonfinite=layer.skip_nonfinite,
            activation=layer.fused_activation,
            num_batches_tracked=tracked,
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
    """Returns a function of input, residual and mask or lengths."""
    way = WAYS[case.way](layer)
    if case.checkpoint:
        way = CHECKPOINTED[case.checkpoint](layer, way)

    def call(input: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
        given: dict[str, Any] = {} if residual is None else {"residual": residual}
        if mask is None:
            return way(input, **given)
        masks = {"lengths" if case.masks == "lengths" else "mask": mask, "zero_masked": case.zero_masked}
        if case.way not in CLASSES:
            return way(input, **given, **masks)
        rule = {"rule": lambda lengths, shape: lengths} if case.masks == "lengths" else {}
        with bagua_syncbn.masked(layer, **masks, **rule):
            return way(input, **given)

    return call


def derivatives(
    outputs: Sequence[Tensor], ranks: Sequence[dict[str, Tensor]], seeds: Sequence[Tensor], first: int, order: int
) -> list[dict[str, Tensor]]:
    """Returns for each of some ranks the gradients of all of its tensors by name, each order with random seeds.

    The seed of a tensor does not depend on whether its rank, of which ``first`` is the first one, is alone here.
    """
    names, found = list(ranks[0]), [{} for _ in ranks]  # type: ignore[var-annotated]
    wanted, values = [tensor for tensors in ranks for tensor in tensors.values()], outputs
    for derivative in range(1, order + 1):
        if not wanted or not values:
            break
        if derivative < order:
            grads = torch.autograd.grad(
                values, wanted, seeds, create_graph=True, allow_unused=True, materialize_grads=True
            )
        else:  # by ``backward``, which reentrant checkpoints require
            torch.autograd.backward(values, seeds)
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in wanted]
            for leaf in wanted:
                leaf.grad = None
        for index, grad in enumerate(grads):
            found[index // len(names)][f"{derivative}. derivative by {names[index % len(names)]}"] = grad.detach()
        pairs = [
            (grad, torch.randn(grad.shape, generator=torch.Generator().manual_seed(99 * derivative + seed)).to(grad))
            for seed, grad in enumerate(grads, first * len(names))
            if grad.requires_grad
        ]
        values, seeds = [grad for grad, _ in pairs], [seed for _, seed in pairs]
    return found


def run_rank(case: Case, process_group: Any = None, rank: int | None = None) -> dict[str, Any]:
    """Runs ``case`` on this rank; returns outputs and derivatives by step, and the buffers at the end."""
    rank = dist.get_rank() if rank is None else rank
    own = slice(sum(case.splits[:rank]), sum(case.splits[: rank + 1]))
    layer, steps = case.layer(), []
    layer.process_group = process_group
    call = call_of(case, layer)
    for step in range(case.steps):
        layer.train(case.trains(step))
        mask = case.mask(step)
        mask = None if mask is None else mask[own]
        parts = [laid_out(whole[own], case.layout) for whole in case.batch(step)]
        if case.zero_masked:
            assert mask is not None
            parts = [part.masked_fill(~positions_of(mask, part), torch.nan) for part in parts]
        input, residual, grad_output = parts
        leaves = {"input": input, "residual": residual} if case.residual else {"input": input}
        leaves = {name: tensor.detach().requires_grad_(name not in case.frozen) for name, tensor in leaves.items()}
        if case.order > 1:
            leaves["grad_output"] = grad_output.requires_grad_()
        with torch.set_grad_enabled(any(tensor.requires_grad for tensor in (*leaves.values(), *layer.parameters()))):
            output = call(leaves["input"], leaves.get("residual"), mask)
        assert output.dtype == case.dtype
        if case.layout not in ("transposed", "sliced"):  # F.batch_norm makes these contiguous
            assert output.stride() == leaves["input"].stride()
        tensors = leaves | dict(layer.named_parameters())
        wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        (found,) = derivatives([output] * output.requires_grad, [wanted], [grad_output], rank, case.order)
        steps.append({"output": output.detach()} | found)
    return {"steps": steps, "buffers": dict(layer.named_buffers())}


def run_ranks(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [run_rank(case) for case in cases]


def positions_of(mask: Tensor, input: Tensor) -> Tensor:
    """Returns the positions (N, 1, \\*) of ``input`` that a mask or lengths hold."""
    if mask.dtype == torch.bool:
        return mask
    return torch.arange(input.size(-1)) < mask.view(-1, *[1] * (input.dim() - 1))


def run_reference(case: Case) -> list[dict[str, Any]]:
    """Returns what each rank must have: ``case`` in one process on the concatenated batch, in float64.

    Each rank has parameters of its own, equal to those of the others, so that their gradients are its share.
    """
    layer = case.layer().double()
    results: list[dict[str, Any]] = [{"steps": []} for _ in case.splits]
    for step in range(case.steps):
        input, residual, grad_output = (tensor.double() for tensor in case.batch(step))
        mask = case.mask(step)
        inside = torch.ones_like(input[:, :1], dtype=torch.bool) if mask is None else positions_of(mask, input)
        inside = inside.expand(input[:, :1].shape)
        if case.zero_masked:
            input, residual, grad_output = (tensor.where(inside, 0) for tensor in (input, residual, grad_output))
        parameters = {name: own for name, own in (("weight", layer.weight), ("bias", layer.bias)) if own is not None}
        tensors = {"input": input, "residual": residual} if case.residual else {"input": input}
        ranks = []
        for rank in range(len(case.splits)):
            own = {name: tensor.split(case.splits)[rank] for name, tensor in tensors.items()}
            if case.order > 1:
                own["grad_output"] = grad_output.split(case.splits)[rank]
            own |= parameters
            ranks.append({name: own[name].detach().clone().requires_grad_(name not in case.frozen) for name in own})
        whole = torch.cat([own["input"] for own in ranks])
        normalized = _normalized(layer, whole, inside, case.trains(step) and "statistics" not in case.frozen)
        outputs = []
        for own, part, counted in zip(ranks, normalized.split(case.splits), inside.split(case.splits), strict=True):
            view = (1, -1, *[1] * (part.dim() - 2))
            output = part * own["weight"].view(view) if "weight" in own else part
            output = output + own["bias"].view(view) if "bias" in own else output
            output = output + own["residual"] if case.residual else output
            activation = activation_of(layer.fused_activation)
            output = output if activation is None else activation.of(output)
            outputs.append(output.where(counted, 0) if case.zero_masked else output)
        wanted = [{name: tensor for name, tensor in own.items() if tensor.requires_grad} for own in ranks]
        seeds = [own["grad_output"] for own in ranks] if case.order > 1 else list(grad_output.split(case.splits))
        needs = outputs[0].requires_grad
        found = derivatives(outputs if needs else [], wanted, seeds, 0, case.order)
        for result, output, own in zip(results, outputs, found, strict=True):
            result["steps"].append({"output": output.detach()} | own)
    return [result | {"buffers": dict(layer.named_buffers())} for result in results]


def _normalized(layer: Any, input: Tensor, inside: Tensor, uses_batch: bool) -> Tensor:
    """Returns ``input`` normalized, by the statistics of the positions ``inside``; then moves the buffers too."""
    view = (1, -1, *[1] * (input.dim() - 2))
    if uses_batch:
        values = input.movedim(1, -1)[inside.squeeze(1)]
        mean = values.mean(0) if len(values) else input.new_zeros(input.size(1))
        var = values.var(0, correction=0) if len(values) else mean
        finite = mean.isfinite().all() and var.isfinite().all()
        if layer.track_running_stats and len(values) > 1 and (finite or not layer.skip_nonfinite):
            layer.num_batches_tracked.add_(1)
            factor = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean.detach(), factor)
            layer.running_var.lerp_(var.detach() * len(values) / (len(values) - 1), factor)
    else:
        mean, var = layer.running_mean, layer.running_var
    divisor = var.clamp(min=layer.eps) if layer.eps_mode == "clamp" else var + layer.eps
    return (input - mean.view(view)) * divisor.rsqrt().view(view)


def check(pool: Any, *cases: Case) -> None:
    """Compares the ranks of cases, all of as many, with one process; without a pool, the one rank in this process."""
    size = len(cases[0].splits)
    ranks = pool.run(run_ranks, size, cases) if pool else [[run_rank(case, rank=0) for case in cases]]
    for case, *results in zip(cases, *ranks, strict=True):
        compare(case, results)


def compare(case: Case, results: Sequence[dict[str, Any]], also: float = 0.0) -> None:
    """Compares what the ranks had in a case with one process; outputs and derivatives may be ``also`` this far off."""
    expected = run_reference(case)
    for rank, (own, wanted) in enumerate(zip(results, expected, strict=True)):
        for step, (values, references) in enumerate(zip(own["steps"], wanted["steps"], strict=True)):
            assert values.keys() == references.keys()
            if case.spoiled and step == case.last_in_training:
                continue
            for name, value in values.items():
                _compare(case, value, references[name], f"{name} of rank {rank} at step {step} of {case}", also)
    first, wanted = results[0]["buffers"], expected[0]["buffers"]
    assert first.keys() == wanted.keys()
    for name, value in first.items():
        assert all(torch.equal(own["buffers"][name], value) for own in results), f"{name} differs between ranks"
        if name != "num_batches_tracked":
            assert_close(value, wanted[name], f"{name} of {case}", roundings=1 + case.steps)
        elif not (case.spoiled and case.way == "own F.batch_norm"):  # which counts by itself
            assert value == wanted[name], f"{name} of {case}"


def _compare(case: Case, actual: Tensor, expected: Tensor, what: str, also: float) -> None:
    """Compares relative to 1 what is added up or rounded in between: it may cancel."""
    rtol, atol = TOLERANCES[actual.dtype]
    follows = case.residual or "activation" in case.options
    if follows or "weight" in what.split(" of rank")[0] or "bias" in what.split(" of rank")[0]:
        atol = rtol
    roundings = 4 if follows else 1
    if case.order > 1:
        atol, roundings = rtol, 100
    rtol, atol = rtol * roundings, atol * roundings + also
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")
