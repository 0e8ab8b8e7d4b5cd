"""No code that reads options depends on their number, so a new option cannot be ignored silently."""

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from bagua_syncbn import _ops as ops
from bagua_syncbn._groups import EVERYONE
from bagua_syncbn._ops.options import Options
from bagua_syncbn._reliability import signatures
from bagua_syncbn._step import by_torch
from bagua_syncbn._step.call import Call

Extended: Any = NamedTuple("Extended", [*Options.__annotations__.items(), ("new", int)])
Extended.__new__.__defaults__ = *Options(), 0


@pytest.fixture(autouse=True)
def extended():
    with patch.object(signatures, "Options", Extended), patch.object(by_torch, "Options", Extended):
        yield


def call_with(options):
    return Call(torch.ones(4, 3), None, None, None, ops.NO_BUFFERS, options, True, EVERYONE, None, "eager")


def test_ranks_compare_a_new_option():
    texts = [
        signatures.signature_of("layer", "model", signatures.shared_options(call_with(options), options), False).text
        for options in (Extended(), Extended(activation="relu"), Extended(new=1))
    ]
    assert texts[0] == texts[1]
    assert texts[2] == texts[0].replace("momentum=0.1", "momentum=0.1, new=1")


def test_torch_computes_no_call_with_a_new_option():
    chosen = [by_torch._suits_torch(call_with(each), each) for each in (Extended(eps=0.1), Extended(new=1))]
    assert chosen == [True, False]
