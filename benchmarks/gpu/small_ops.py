"""One small input of each kind through each op, for compute-sanitizer: light and split, both layouts, all dtypes.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu.small_ops
    python -m benchmarks.gpu.small_ops --device cpu

Inputs are made and results are compared on the CPU, so that hardly any kernels run but ours.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

import bagua_syncbn
from bagua_syncbn import ops
from bagua_syncbn.ops import reference

from .inputs import lay_out
from .shapes import Case

# Rows that are aligned and rows that are not, also in groups of channels; channels that fill slots and channels that do
# not; more than one part.
SHAPES = (
    (3, 2, 16, 16), (2, 3, 7, 7), (2, 1056, 3, 11), (2, 8, 64, 64), (1, 2, 150, 151), (40, 24, 5, 5), (3, 2500, 1, 2),
)  # fmt: skip
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def run(case: Case, device: torch.device) -> float:
    """Returns how far results are from the reference in float64, in what is allowed."""
    dtype = getattr(torch, case.dtype)
    x, dy = (lay_out(torch.randn(case.values).to(dtype), case) for _ in range(2))
    weight, bias, mean, var = torch.rand(4, case.channels, dtype=ops.accumulate_dtype(dtype)).unbind()
    buffers = mean, var, torch.tensor(0)
    mask = torch.rand(x.size(0), *x.shape[2:]) < 0.5
    lengths = torch.randint(x.size(-1) + 1, x.shape[:1])

    def step(kernels: Any, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
        a, b, w, c, *running = (to(t) for t in (x, dy, weight, bias, *buffers))
        packed = kernels.batch_norm_stats(a)
        mean, invstd, count = kernels.batch_norm_gather_stats(packed[None], *running, None, 1e-5)
        output = kernels.batch_norm_elemt(a, w, c, mean, invstd)
        sums, *grads = kernels.batch_norm_backward_reduce(b, a, mean, invstd, w)
        grad_input = kernels.batch_norm_backward_elemt(b, a, w, mean, invstd, sums, count)
        act = ops.activation_of("silu").code, 0.0
        output_act = kernels.batch_norm_act_elemt(a, w, c, mean, invstd, b, *act)
        sums, *grads_act = kernels.batch_norm_act_backward_reduce(b, a, mean, invstd, w, c, b, *act)
        grad_input_act = kernels.batch_norm_act_backward_elemt(b, a, w, mean, invstd, sums, count, c, *act)
        results = [output, grad_input, *grads, output_act, grad_input_act, *grads_act, *running]
        for m in (to(mask), to(lengths)):
            packed = kernels.batch_norm_masked_stats(a, m)
            output = kernels.batch_norm_masked_elemt(a, w, c, mean, invstd, m)
            sums, *grads = kernels.batch_norm_masked_backward_reduce(b, a, mean, invstd, w, m)
            grad_input = kernels.batch_norm_masked_backward_elemt(b, a, w, mean, invstd, sums, count, m)
            results += packed, output, grad_input, *grads
        return [t.cpu().double() for t in results]

    actual = step(ops, lambda t: t.clone().to(device))
    expected = step(reference, lambda t: t.clone().double() if t.is_floating_point() else t.clone())
    errors = ((a - e).abs().max() / (1 + e.abs().max()) for a, e in zip(actual, expected, strict=True))
    return float(max(errors)) / TOLERANCE[case.dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wrong = 0
    for shape, dtype, layout in product(SHAPES, TOLERANCE, ("planar", "interleaved")):
        error = run(Case("small", shape, dtype, layout), device)
        if not error <= 1:
            print(f"{shape} {dtype} {layout}: {error:.3g} times what is allowed")
            wrong += 1
    print(f"{bagua_syncbn.__file__}, {ops.KERNELS}: {wrong} wrong")
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main()
