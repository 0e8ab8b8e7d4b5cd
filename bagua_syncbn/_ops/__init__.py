r"""Five ops of ``torch.ops.bagua_syncbn`` compute the step between messages. They do not communicate.

``input`` is (N, C, \*), with a dtype in ``DTYPES``. The *accumulate dtype* is float64 for float64 input and float32
otherwise; ``mean``, ``invstd`` and messages use it, except that ``summed`` messages are float64. ``_ops/headers.py``
describes messages.

==============================  =====================================================================================
``batch_norm_stats``            Returns the message in forward: mean and biased variance per channel, the number of
                                values per channel, and a header for ``identity`` and ``number``; if ``summed``, sums
                                that add up over ranks, with ``identity`` as the fingerprint
``batch_norm_gather_stats``     Merges ``gathered``, with a row per rank or the sum over ``ranks``. Returns ``mean``
                                (C), ``invstd`` (C) and ``count`` (int64 scalar). Updates the running statistics in
                                place; with ``skip_nonfinite``, only if they are finite. If headers differ or a count is
                                invalid, ``mean`` and ``invstd`` are NaN, buffers keep their values, and ``fault``
                                records it
``batch_norm_elemt``            Returns ``act(z)``, ``z = (input - mean) * invstd * weight + bias + residual``, in the
                                dtype and memory format of ``input``
``batch_norm_backward_reduce``  Returns ``sums``, the message in backward, and ``grad_weight`` (C) and ``grad_bias``
                                (C) of this rank, in the dtype of ``weight`` or else the accumulate dtype. Writes
                                ``g = grad_output * act'(z)``, the gradient of ``residual``, to ``grad``
``batch_norm_backward_elemt``   Returns the gradient of ``input``, given the ``sums`` and ``count`` of all ``ranks``.
                                With an activation (and no residual), it recomputes ``g``. If the header sums differ,
                                the gradient is NaN, and ``fault`` records it. If ``grad_input`` is given (it may be
                                ``grad_output``), the op writes to it and returns an empty tensor
==============================  =====================================================================================

``activation`` is an index in ``activations.py``; 0 means no activation. ``mask``, a contiguous bool (N, \*), holds the
valid positions of all channels. The statistics ignore invalid positions. At invalid positions,
``batch_norm_backward_elemt`` (without an activation) returns ``grad_output * invstd * weight``. Rare arguments are
last, because arguments that are not passed take no time.

``fault`` is an int64 tensor (8) in host memory, pinned for devices. The first fault stays until the host clears it:

========================  =============================================================================================
``[0, ...]``              none
``[1, rank, a, b]``       the header of ``rank`` (b, 3 values) differs from that of rank 0 (a, 3 values)
``[2, rank, a, b]``       the count of ``rank`` is not an integer from 0 to ``2**53``
``[3, number, ...]``      headers differ, or the count is invalid, in the sum that the op with this ``number`` read
========================  =============================================================================================
"""

import torch

from . import reference
from .activations import IDENTITY, Activation, activation_of
from .definition import DTYPES, HALF_DTYPES, accumulate_dtype, laid_out_as, per_channel, reduced_dims
from .eps import clear_clamped, inverse_deviation, is_clamped
from .headers import HEADER_SIZE, HEADER_SUMS_SIZE, WORD, header_of, header_sums_of
from .merge import NO_BUFFERS, Buffers, Received, merge_in_graph, merge_stats, this_thread
from .moments import Moments
from .native import KERNELS

batch_norm_stats = torch.ops.bagua_syncbn.batch_norm_stats.default
batch_norm_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default
batch_norm_elemt = torch.ops.bagua_syncbn.batch_norm_elemt.default
batch_norm_backward_reduce = torch.ops.bagua_syncbn.batch_norm_backward_reduce.default
batch_norm_backward_elemt = torch.ops.bagua_syncbn.batch_norm_backward_elemt.default
