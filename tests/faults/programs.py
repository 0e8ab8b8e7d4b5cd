"""Programs for ranks that diverge: strings of calls, and what one rank does otherwise.

``a``, ``b``, ``c`` call a layer in forward on data of its own: ``a`` and ``b`` of 8 channels, ``c`` of 12. ``<`` is a
backward pass of all that was called since the last one, ``>`` the same from the last call to the first one by one,
``!`` an exception that the program catches and goes on with its next step.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua_syncbn
from bagua_syncbn.communicators import TorchCommunicator

STEPS = 3

Change = Callable[["Model"], Any]


class SwallowedError(Exception):
    """What a program raises and catches."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.BatchNorm1d(12)
        self.no_gradient_for = self.raises_in_backward = ""
        self.grad = True

    def run(self, program: str) -> None:
        outputs: list[Tensor] = []
        for call in program:
            if call == "!":
                raise SwallowedError
            if call in "<>":
                for part in [outputs] if call == "<" else [[output] for output in outputs]:
                    torch.autograd.backward(part, [torch.randn_like(output) for output in part])
                outputs = []
            else:
                output = self.call(call)
                if output.requires_grad:
                    outputs.append(output)

    def call(self, name: str) -> Tensor:
        layer = getattr(self, name)
        x = torch.randn(4, layer.num_features, dtype=layer.weight.dtype)
        before = [buffer.clone() for buffer in layer.buffers()]
        try:
            with torch.set_grad_enabled(self.grad):
                output: Tensor = layer(x.requires_grad_(name not in self.no_gradient_for))
        except RuntimeError:
            assert all(map(torch.equal, before, layer.buffers())), "buffers changed in a call that failed"
            raise
        if name in self.raises_in_backward:
            output.register_hook(_raise_swallowed)
        return output


def _raise_swallowed(_: Any) -> None:
    raise SwallowedError


def run(base: str, program: str, change: Change | None, when: int, timeout: float) -> str:
    """Runs ``base`` for three steps; on the last rank, from step ``when`` on, ``program``, after ``change``.

    Returns:
        the message of the error in which it ended, or "finished".
    """
    torch.manual_seed(dist.get_rank())
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    model: Any = bagua_syncbn.convert_sync_batchnorm(Model(), TorchCommunicator(group))
    try:
        for step in range(STEPS):
            diverges = is_odd and step >= when
            if diverges and step == when and change is not None:
                change(model)
            with suppress(SwallowedError):
                model.run(program if diverges else base)
    except RuntimeError as error:
        return str(error)
    else:
        return "finished"
    finally:
        dist.destroy_process_group(group)


def run_after_failure() -> list[str]:
    """Two calls of ranks that do not agree. Returns the messages of both."""
    group = dist.new_group()
    model: Any = bagua_syncbn.convert_sync_batchnorm(Model(), TorchCommunicator(group))
    messages = []
    for _ in range(2):
        try:
            model.call("a" if dist.get_rank() == 0 else "b")
        except RuntimeError as error:
            messages.append(str(error))
    dist.destroy_process_group(group)
    return messages
