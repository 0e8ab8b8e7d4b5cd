r"""The five ops, which compute and know nothing of ranks: those of ``torch.ops.bagua_syncbn``.

Shapes and dtypes. ``input`` is (N, C, \*), of one of ``DTYPES``. The *accumulate dtype* is float64 for
float64 input and float32 for all others; ``mean``, ``invstd`` and everything that crosses ranks have it.

==============================  =====================================================================================
``batch_norm_stats``            ``input`` to one contiguous tensor of 2C + 2 + K values,
                                ``[mean (C) | var (C) | count (2) | header (K)]``: mean and biased variance of each
                                channel, and the number of values per channel. If ``summable``, to 2C + 1 + 6 values
                                of float64 that add up over ranks, with ``caller`` as the fingerprint:
                                ``[n * mean (C) | n * (var + mean**2) (C) | n | header_sums (6)]``
``batch_norm_gather_stats``     ``gathered`` (W, 2C + 2 + K), one row per rank, or (2C + 1 + 6), the sum of those of all
                                ``ranks``, to ``mean`` (C), ``invstd`` (C) and ``count`` (int64 scalar) of all ranks
                                together; updates the running statistics in place, with ``skip_nonfinite`` only if they
                                stay finite. Where the headers differ between ranks, or a count is none, ``mean`` and
                                ``invstd`` are NaN, no buffer changes and ``fault`` says so
``batch_norm_elemt``            ``act(z)``, ``z = (input - mean) * invstd * weight + bias + residual``, in the dtype and
                                memory format of ``input``
``batch_norm_backward_reduce``  to ``sums`` of 2C + K values, ``[sum_g (C) | sum_g_xmu (C) | header_sums (K)]``; ``g``
                                is ``grad_output * act'(z)``, made from ``input`` and ``residual`` once more, and
                                ``xmu`` is ``input - mean``, with header sums for ``fingerprint``; ``grad_weight`` (C)
                                and ``grad_bias`` (C) of this rank, in the dtype of ``weight`` if there is one, else in
                                the accumulate dtype. ``grad``, in the dtype and memory format of ``input``, receives
                                ``g``: the gradient of ``residual``
``batch_norm_backward_elemt``   to the gradient of ``input``, given the ``sums`` and ``count`` of all ``ranks``; with an
                                activation, from ``g`` made of ``grad_output`` and ``input`` once more, without a
                                residual. If the ranks' headers differ in the K header sums behind the 2C sums, the
                                gradient is NaN and ``fault`` says so. ``grad_input``, if given, receives the result,
                                and may be ``grad_output``; the returned tensor is then empty
==============================  =====================================================================================

``activation`` is the code of one in ``activations.py``; 0 is none, as ``None`` is no ``residual`` and no ``mask``.

``mask`` says which positions count, the same for all channels: a contiguous bool (N, \*), or int64 lengths (N) for an
input (N, C, \*, L), where sample ``n`` counts up to ``lengths[n]`` along L. ``batch_norm_stats`` leaves out all other
positions. There ``batch_norm_backward_elemt``, which takes no activation with a mask, gives
``grad_output * invstd * weight``: nothing passes through the statistics.

The layout of messages, with counts and headers, is in ``ops/headers.py``. Few calls need the last arguments of an op:
the host spends half a microsecond on every argument that is given, and a tenth on one that is not.

``fault`` is an int64 tensor of 8 values in the memory of the host, pinned for a device that writes to it; the first
fault stays until the host clears it:

========================  =============================================================================================
``[0, ...]``              none
``[1, rank, a, b]``       the header of ``rank`` (b, 3 values) differs from that of rank 0 (a, 3 values)
``[2, rank, a, b]``       the count of ``rank`` is not an integer from 0 to ``2**53``
``[3, call, ...]``        the headers differed in the sum that the op with this ``call`` read
========================  =============================================================================================
"""

import torch

from . import reference
from .activations import IDENTITY, Activation, activation_of
from .definition import DTYPES, HALF_DTYPES, accumulate_dtype, laid_out_as, per_channel, reduced_dims
from .failures import raise_torchs
from .headers import HEADER_SIZE, HEADER_SUMS_SIZE, WORD, header_of, header_sums_of
from .masking import Masking, of_positions
from .moments import Moments
from .native import KERNELS, hold_buffers
from .running_stats import (
    NO_BUFFERS,
    Buffers,
    clear_clamped,
    inverse_deviation,
    is_clamped,
    merge_stats,
)

batch_norm_stats = torch.ops.bagua_syncbn.batch_norm_stats.default
batch_norm_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default
batch_norm_elemt = torch.ops.bagua_syncbn.batch_norm_elemt.default
batch_norm_backward_reduce = torch.ops.bagua_syncbn.batch_norm_backward_reduce.default
batch_norm_backward_elemt = torch.ops.bagua_syncbn.batch_norm_backward_elemt.default
