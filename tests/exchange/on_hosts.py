"""A rank of a job over two hosts, as test_hosts.py starts it: ``on_hosts.py WHAT TIME_OUT [DYING_RANK]``."""

import json
import os
import signal
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn.groups import spec_of

STEPS = 60


def say(answer):
    os.write(1, f"{json.dumps(answer)}\n".encode())  # in one piece: the ranks of a host share a pipe


def model_over(process_group, **options):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.BatchNorm2d(64), nn.Tanh(), nn.BatchNorm2d(64, momentum=None)).double()
    return bagua_syncbn.convert_sync_batchnorm(layers, process_group, **options)


def one_step(model, input, grad_output):
    """Returns output and gradients, and all buffers."""
    input = input.clone().requires_grad_()
    output = model(input)
    output.backward(grad_output)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [output.detach(), input.grad], gradients, list(model.buffers())


def largest_error(process_group, ranks):
    """Returns how far this rank is from one process on the batches of ``ranks``, of which the second one has none."""
    ranks, size = list(ranks), dist.get_world_size()
    samples = [0 if rank == 1 else rank + 2 for rank in range(size)]
    generator = torch.Generator().manual_seed(7)
    batches, grad_outputs = (
        [torch.randn(count, 64, 5, 5, generator=generator, dtype=torch.float64) + 3 for count in samples]
        for _ in range(2)
    )
    me, first = dist.get_rank(), sum(samples[rank] for rank in ranks if rank < dist.get_rank())
    own, gradients, buffers = one_step(model_over(process_group), batches[me], grad_outputs[me])
    for gradient in gradients:  # the rank's share
        dist.all_reduce(gradient, group=bagua_syncbn.sync_group(process_group) if process_group else None)
    together = [torch.cat([values[rank] for rank in ranks]) for values in (batches, grad_outputs)]
    expected, expected_gradients, expected_buffers = one_step(model_over([[rank] for rank in range(size)]), *together)
    expected = [value[first : first + samples[me]] for value in expected]
    pairs = zip([*own, *gradients, *buffers], [*expected, *expected_gradients, *expected_buffers], strict=True)
    return max(((one - other).abs() / (1 + other.abs())).max().item() for one, other in pairs if one.numel())


def step_time(process_group):
    """Returns the median of a layer's steps in ms."""
    layer = bagua_syncbn.SyncBatchNorm(64, process_group=process_group)
    input, grad_output = torch.randn(4, 64, 14, 14, requires_grad=True), torch.randn(4, 64, 14, 14)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        layer(input).backward(grad_output)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[STEPS // 4 :]) * 1e3


def values():
    node = spec_of("node").members()
    local, size = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
    layer = bagua_syncbn.SyncBatchNorm(500, momentum=1.0)
    layer(torch.randn(3, 500))
    sent = [torch.empty(500) for _ in range(size)]
    dist.all_gather(sent, layer.running_mean)
    return {
        "node": node,
        "way": type(spec_of(None).communicator()).__name__,
        "host": os.environ["GROUP_RANK"],
        "error": largest_error(None, range(size)),
        "error on node": largest_error("node", node),
        "same bits": all(torch.equal(one, sent[0]) for one in sent),
        "ms over hosts": step_time(None),
        "ms on a host": step_time("node") if local > 1 else None,
    }


def until_death():
    """Trains until a step fails, and says what it is told, and when. A rank ends itself, or the test ends a host."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the ranks of a host if one has failed
    model, input = model_over(None), torch.randn(4, 64, 14, 14, dtype=torch.float64)
    begin = time.monotonic()
    while time.monotonic() - begin < 60:
        try:
            model(input).sum().backward()
        except RuntimeError as error:
            return {"told": str(error), "at": time.time()}
        if time.monotonic() - begin > 1:
            if dist.get_rank() == int(sys.argv[3]):
                say({"rank": dist.get_rank(), "at": time.time()})
                os.kill(os.getpid(), signal.SIGKILL)
            say("trains")
    return {}


torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2])))
answer = globals()[sys.argv[1]]()
say({"rank": dist.get_rank(), **answer})
if "told" in answer:
    time.sleep(2)  # so that the others learn of the first death and not of this one
    os._exit(1)
dist.destroy_process_group()
