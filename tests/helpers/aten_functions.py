"""ATen's batch norm functions for CUDA, simulated on CPU.

They check the conditions that ATen checks or assumes: dtypes, sizes, contiguous factors.
"""

import torch

from bagua_syncbn._ops import accumulate_dtype, reduced_dims, reference


def check_factors(input, *factors):
    for factor in factors:
        assert factor is None or factor.is_contiguous()
        assert factor is None or factor.shape == (input.size(1),)
        assert factor is None or factor.dtype == accumulate_dtype(input.dtype)


def update_stats(input, running_mean, running_var, momentum):
    assert running_mean is running_var is None
    assert input.numel() > 0
    var, mean = torch.var_mean(input.to(accumulate_dtype(input.dtype)), reduced_dims(input), correction=0)
    return mean, var


def elemt(input, weight, bias, mean, invstd, eps):
    check_factors(input, weight, bias, mean, invstd)
    return reference.batch_norm_elemt(input, weight, bias, mean, invstd)


def backward_reduce(grad_output, input, mean, invstd, weight, input_g, weight_g, bias_g):
    assert (grad_output.shape, grad_output.dtype, weight) == (input.shape, input.dtype, None)
    assert (input_g, weight_g, bias_g) == (True, False, False)
    check_factors(input, mean, invstd)
    sums = reference.batch_norm_backward_reduce(grad_output, input, mean, invstd, None)[0]
    return *(half.clone() for half in sums.chunk(2)), None, None


def backward_elemt(grad_output, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    assert (grad_output.shape, grad_output.dtype) == (input.shape, input.dtype)
    assert (count.dtype, count.dim()) == (torch.int32, 1)
    check_factors(input, mean, invstd, weight, sum_dy, sum_dy_xmu)
    sums = torch.cat([sum_dy, sum_dy_xmu])
    dx = reference.batch_norm_backward_elemt(grad_output, input, weight, mean, invstd, sums, count.sum())
    both = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in (grad_output, input))
    return dx if both else dx.contiguous()


ATEN = {
    "batch_norm_update_stats": update_stats,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}
