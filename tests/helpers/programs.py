"""Programs that call a layer in any order, on ranks and in one process."""

import copy

import torch.distributed as dist

from bagua_syncbn import convert_sync_batchnorm
from tests.helpers.observed import collectives
from tests.helpers.steps import check_ranks, draw

SPLITS = (2, 5)


def check_program(program, layer, reference=None):
    """Compares two steps of ``program(layer, input, own)`` on ranks with ``reference``, or ``program``, in one process.

    ``own`` returns this rank's share of a batch. Returns the collectives of this rank.
    """
    splits, rank = (SPLITS, dist.get_rank()) if dist.is_initialized() else ((sum(SPLITS),), 0)
    plain = copy.deepcopy(layer).double()
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    with collectives() as sent:
        for seed in range(2):
            input, grad_output = draw(2, sum(SPLITS), 4, seed=seed)
            check_ranks(
                *(model, plain, input, grad_output, splits),
                call=lambda x: program(model, x, lambda batch: batch.split(splits)[rank]),
                reference=lambda x: (reference or program)(plain, x, lambda batch: batch),
            )
    return sent
