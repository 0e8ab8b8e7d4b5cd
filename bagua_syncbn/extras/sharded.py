"""DTensor input, without the import of torch.distributed.tensor, which takes a second, before the first one."""

from torch import Tensor

from ..checks import is_distributed
from ..functional import batch_norm, special_inputs
from ..step.call import Call


@special_inputs.register
def _on_shards(call: Call) -> Tensor | None:
    """Computes ``call`` on the shards of this rank."""
    if not is_distributed(call.input):
        return None
    from .shards import shards_of

    on_shards, whole = shards_of(call)
    return whole(batch_norm(on_shards))
