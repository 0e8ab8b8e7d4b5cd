"""Names that pickles and ``torch.save`` files of whole models contain, besides those of layer classes.

Files of earlier versions need every name and its positional arguments: a class may move inside the package, or become
a function here, if old arguments still work.
"""

from ._groups.spec import GroupSpec, RankGroup, spec_of
from ._names import ConvertedModel, Origin
from ._ops.activations import Activation
from ._step.layer_state import LayerState
from .conversion.classes import _new_layer as new_layer
from .memory.fusing import FusedActivation
from .memory.recomputing import _make_recomputing as make_recomputing

_NAMES = {
    "Activation": Activation,
    "ConvertedModel": ConvertedModel,
    "FusedActivation": FusedActivation,
    "GroupSpec": GroupSpec,
    "LayerState": LayerState,
    "Origin": Origin,
    "RankGroup": RankGroup,
    "make_recomputing": make_recomputing,
    "new_layer": new_layer,
    "spec_of": spec_of,
}

# Pickle writes these two attributes as the name.
for _name, _thing in _NAMES.items():
    _thing.__module__, _thing.__qualname__ = __name__, _name
