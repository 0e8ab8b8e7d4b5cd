"""Names in pickles and ``torch.save`` files of whole models, besides the classes of layers and wrappers.

Later versions must keep them. Files of 0.1 contain all of them, with positional arguments.
"""

from ._groups.spec import GroupSpec, RankGroup, spec_of  # noqa: F401
from ._names import ConvertedModel, Origin  # noqa: F401
from ._ops.activations import Activation
from ._step.layer_state import LayerState
from .conversion.classes import _new_layer as new_layer
from .memory.fusing import FusedActivation
from .memory.recomputing import _make_recomputing as make_recomputing

for _thing in (Activation, ConvertedModel, FusedActivation, LayerState, RankGroup, make_recomputing, new_layer):
    # Pickle writes these two attributes as the name.
    _thing.__module__, _thing.__qualname__ = __name__, _thing.__name__.removeprefix("_")
