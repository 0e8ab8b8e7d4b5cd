"""The verdict: whether the ranks equal one process, and if not, what differs and what was seen to cause it."""

import argparse
import importlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..unchanged import digest, unchanged
from .comparison import Pair, first_difference
from .layers import LayerChecks
from .ranks import Ranks, in_float64, joined, share_of, tensors_in
from .steps import (
    Loss,
    Step,
    copied,
    loss_of,
    random_modules,
    run,
    telling_peers,
    tensors_of,
    try_out,
    unwrapped,
)


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`verify_synchronization`, the same on all ranks: true if they equal one process."""

    ranks: int
    """Number of ranks."""
    compared: str
    """Number of tensors, or layers, that were compared."""
    difference: str | None
    """The first tensor that differs, and by how much; None if none does."""
    seen: tuple[str, ...]
    """Causes, each found by a test of its own, and what was not compared."""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        are = ("ranks", "equal", "differ from") if self.ranks > 1 else ("rank", "equals", "differs from")
        told = f"{are[1]} one process: {self.compared}"
        if self.difference is not None:
            told = f"{are[2]} one process: {self.difference}"
        return "\n- ".join([f"{self.ranks} {are[0]} {told}", *self.seen])


def verify_synchronization(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    group: Any = None,
    merge: Callable[[list[Any]], Any] | None = None,
    by_layer: bool = False,
) -> Verdict:
    """Compares a step of ``model`` on all ranks with the same step in one process on all their batches together.

    Both steps are made in float64, on copies, and the gradients of the ranks are averaged, as by
    DistributedDataParallel. Outputs, losses, gradients and buffers are compared. Where they differ, tests of their own
    look for the cause: what differs between ranks before the step, dropout and other randomness, layers that are not
    synchronized, parameters without a gradient, losses that are sums, or means over batches of other sizes.

    The model, its gradients, buffers and modes, and random states are as before, also after an exception. An error of
    one rank is raised on all. All ranks make the call.

    Args:
        model: in training mode, in DistributedDataParallel or not.
        batch: the batch of this rank: tensors in any nesting of tuples, lists and dicts.
        loss: called with a copy of the model, which is in no wrapper, and a batch; returns a scalar tensor. It must use
            no other model, and send nothing between ranks.
        group: the ranks that take part, as for :func:`sync_batch_norm`; None for all of the job.
        merge: makes one batch of a list of the batches of all ranks. None joins tensors along their first dimension,
            and wants all else the same on all ranks.
        by_layer: whether to copy nothing but one layer at a time: each batch normalization layer, on the inputs that
            it meets in a forward pass of ``model`` without gradients. For models that are sharded, or do not fit twice.

    Raises:
        ValueError: ``model`` is in evaluation mode; with ``by_layer``, a layer cannot be compared by itself.
        RuntimeError: a rank has raised: ``loss`` is wrong, batches cannot be joined, the model cannot be copied.

    Example::

        >>> verdict = bagua_syncbn.verify_synchronization(model, (images, labels), lambda model, batch: ...)
        >>> print(verdict)
        2 ranks equal one process: 1 output, 1 loss, 6 gradients, 6 buffers
    """
    ranks = Ranks(group)
    module = ranks.each("the check of the model", lambda: _checked(model, loss))
    with unchanged(module), torch.inference_mode(False):
        tensors = {} if by_layer else tensors_of(module)  # a sharded model has others on each rank
        modes = {f"mode of module {name!r}": own.training for name, own in module.named_modules()}
        kinds = {name: (str(own.dtype), tuple(own.shape)) for name, own in tensors.items()}
        unlike = _unlike(ranks, lambda: modes | kinds)
        if unlike:
            return Verdict(ranks.size, "nothing", f"{unlike[0]} is not alike on all ranks before the step", ())
        if by_layer:
            return _verify_layers(module, batch, loss, ranks)
        differ = _unlike(ranks, lambda: {name: digest(own) for name, own in tensors.items()})
        merge = merge or (lambda batches: joined(batches, "batch"))
        return _Verification(model, batch, loss, ranks, merge).verdict(differ)


def _checked(model: Any, loss: Any) -> nn.Module:
    """Returns ``model`` without its wrappers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not callable(loss):
        raise TypeError(f"loss: expected a function of the model and a batch, got {type(loss).__name__}")
    if not model.training:
        raise ValueError("model: expected training mode, got evaluation; call model.train() first")
    return unwrapped(model)


def _unlike(ranks: Ranks, facts: Callable[[], dict[str, Any]]) -> list[str]:
    """Returns the names of ``facts`` that differ between ranks."""
    of_ranks = ranks.together("the state of the model", facts)
    names = dict.fromkeys(name for own in of_ranks for name in own)
    return [name for name in names if any(own.get(name) != of_ranks[0].get(name) for own in of_ranks)]


def _verify_layers(model: nn.Module, batch: Any, loss: Loss, ranks: Ranks) -> Verdict:
    checks = LayerChecks(ranks)
    with torch.no_grad():
        with unchanged(model):
            ranks.together("a trial of the loss", lambda: try_out(model, batch, loss))
        with checks.installed(model):
            ranks.each("the forward pass", lambda: telling_peers(model, lambda: loss_of(model, batch, loss)))
    if not checks.compared:
        raise ValueError("model: expected calls of batch normalization layers in training, got none")
    first, *others = (*checks.differ.values(), *checks.unlike) or (None,)
    told = f"{checks.compared} layer{'s' * (checks.compared != 1)}, on the inputs that they met"
    return Verdict(ranks.size, told, first, tuple(others))


class _Verification:
    """The step of a whole model, on the ranks and in one process."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, ranks: Ranks, merge: Any) -> None:
        self._model, self._batch, self._loss, self._ranks, self._merge = unwrapped(model), batch, loss, ranks, merge
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self._values: dict[str, Tensor] = {}  # values of rank 0 for tensors that differ between ranks
        self._own_values: dict[str, Tensor] = {}  # buffers that DistributedDataParallel broadcasts
        self._seen: list[str] = []

    def verdict(self, differ: Sequence[str]) -> Verdict:
        """Returns the verdict, given the names of tensors that differ between ranks before the step."""
        ranks = self._ranks
        self._note_before(differ)
        ranks.together("a trial of the loss", lambda: try_out(self._copy(), self._own_batch(), self._loss))
        batches = ranks.together("the batch", lambda: self._batch)
        whole = ranks.each("the merge of batches", lambda: in_float64(self._merge(batches), self._batch))
        expected, actual = self._step_alone(whole), self._step()
        pairs = self._pairs(actual, expected)
        first = first_difference(ranks, pairs)
        difference = self._unused(actual)
        if first is not None:
            difference = first.text
            self._look_for_causes(actual, expected, whole)
            if not self._seen:
                is_loss = first.position and pairs[first.position].kind == "loss"
                unequal = "outputs are equal: the loss of all batches is not the mean of the losses of ranks"
                self._seen.append(unequal if is_loss else "no cause was found")
        counted = Counter(pair.kind for pair in pairs)
        compared = ", ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in counted.items())
        return Verdict(ranks.size, compared, difference, tuple(self._seen))

    def _note_before(self, differ: Sequence[str]) -> None:
        own = tensors_of(self._model) if self._ranks.rank == 0 else {}
        values = self._ranks.together("the values of rank 0", lambda: {name: own[name] for name in differ if own})
        self._values = values[0]
        if self._wrapper is not None and self._wrapper.broadcast_buffers:
            buffers = dict(self._model.named_buffers())
            self._own_values = {name: value for name, value in self._values.items() if name in buffers}
        noted = (name for name in differ if name not in self._own_values)
        self._seen += [f"{name} differs between ranks before the step" for name in noted]

    def _copy(self, alone: bool = False) -> nn.Module:
        return copied(self._model, self._values if alone else self._own_values, alone)

    def _own_batch(self) -> Any:
        return in_float64(self._batch, self._batch)

    def _step_alone(self, whole: Any) -> Step:
        return self._ranks.each("the step in one process", lambda: run(self._copy(alone=True), whole, self._loss))

    def _step(self, weight: float = 1.0, checks: LayerChecks | None = None) -> Step:
        """Makes the step on the ranks, with a loss that is multiplied by ``weight``."""

        def step() -> Step:
            model = self._copy()
            with nullcontext() if checks is None else checks.installed(model):
                return telling_peers(model, lambda: run(model, self._own_batch(), self._loss, weight))

        return self._ranks.each("the step on ranks", step)

    def _pairs(self, actual: Step, expected: Step, factor: float = 1.0) -> list[Pair]:
        """Returns outputs, loss, gradients and buffers; losses and gradients averaged, and multiplied by ``factor``."""
        ranks, pairs = self._ranks, []
        shapes = ranks.together("the outputs", lambda: [list(output.shape) for output in actual.outputs])
        if all(len(own) == len(expected.outputs) for own in shapes):
            for index, output in enumerate(actual.outputs):
                share = share_of(expected.outputs[index], [own[index] for own in shapes], ranks.rank)
                if share is not None:
                    pairs.append(Pair("output", str(index) * (len(actual.outputs) > 1), output, share))
        pairs.append(Pair("loss", "", ranks.add_up(actual.loss.clone()) * factor / ranks.size, expected.loss))
        has = ranks.together("the gradients", lambda: [own is not None for own in actual.gradients.values()])
        for (name, own), *have in zip(actual.gradients.items(), *has, strict=True):
            whole = expected.gradients[name]
            if any(have) or whole is not None:
                zeros = torch.zeros_like(self._model.get_parameter(name), dtype=torch.float64)
                total = ranks.add_up(zeros if own is None else own.to_dense().clone()) * factor / ranks.size
                pairs.append(Pair("gradient", name, total, zeros if whole is None else whole.to_dense()))
        return pairs + [Pair("buffer", name, own, expected.buffers[name]) for name, own in actual.buffers.items()]

    def _unused(self, actual: Step) -> str | None:
        """Notes parameters without a gradient on some ranks. Returns one that DistributedDataParallel does not take."""
        wrapper, own = self._wrapper, [name for name, grad in actual.gradients.items() if grad is None]
        of_ranks = self._ranks.together("the gradients", lambda: own)
        fails = wrapper is not None and not (wrapper.find_unused_parameters or wrapper.static_graph)
        told = []
        for name in dict.fromkeys(name for names in of_ranks for name in names):
            which = [str(rank) for rank, names in enumerate(of_ranks) if name in names]
            if fails or len(which) < self._ranks.size:
                told.append(
                    f"gradient {name}: none on rank{'s' * (len(which) > 1)} {', '.join(which)}, in which it is unused"
                )
        self._seen += [f"{text}; DistributedDataParallel needs find_unused_parameters=True" for text in told]
        return told[0] if fails and told else None

    def _look_for_causes(self, actual: Step, expected: Step, whole: Any) -> None:
        ranks, again, checks = self._ranks, self._step_alone(whole), LayerChecks(self._ranks)
        both = zip([again.loss, *again.outputs], [expected.loss, *expected.outputs], strict=False)
        is_random = first_difference(ranks, [Pair("", "", *pair) for pair in both]) is not None
        if is_random:
            copy = lambda: self._copy(alone=True)  # noqa: E731
            found = ranks.together("the third step", lambda: random_modules(copy(), whole, self._loss))
            names = dict.fromkeys(name for own in found for name in own)
            told = [f"{name} is random: it gives another output for the same input" for name in names]
            self._seen += told or ["the step is random: a second one in one process gives another result"]
        with suppress(Exception):  # a layer that cannot be compared raises on all ranks
            self._step(checks=checks)
        self._seen += checks.differ.values()
        if is_random or checks.differ or ranks.size == 1:
            return
        if first_difference(ranks, self._pairs(actual, expected, ranks.size)) is None:
            self._seen.append("the loss adds up over samples: added up and not averaged, ranks equal one process")
        sizes = {tensor.size(0) for tensor in tensors_in(self._batch) if tensor.dim()}
        counts: list[Any] = ranks.together("the sizes of batches", lambda: sizes.pop() if len(sizes) == 1 else None)
        if None not in counts and len(set(counts)) > 1:
            weighted = self._step(counts[ranks.rank] * ranks.size / sum(counts))
            if first_difference(ranks, self._pairs(weighted, expected)) is None:
                self._seen.append(
                    f"the loss is a mean over batches of {', '.join(map(str, counts))} samples: multiplied by samples "
                    "* ranks / all samples, ranks equal one process"
                )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``python -m bagua_syncbn verify package.module:function``, which ends with 1 if ranks differ."""
    parser = argparse.ArgumentParser(
        prog="python -m bagua_syncbn verify",
        description="Compares a step of a model on all ranks with one in one process; run it by torchrun.",
    )
    parser.add_argument("function", help="package.module:function, which returns model, batch and loss")
    parser.add_argument("--by-layer", action="store_true", help="copy one layer at a time in place of the model")
    given = parser.parse_args(arguments)
    module, _, name = given.function.partition(":")
    if not name:
        parser.error(f"function: expected package.module:function, got {given.function}")
    starts_job = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if starts_job:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    verdict = verify_synchronization(*getattr(importlib.import_module(module), name)(), by_layer=given.by_layer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(verdict)
    if starts_job:
        dist.destroy_process_group()
    raise SystemExit(0 if verdict else 1)
