"""The implementations of the ops that tests compare with the definition."""

from unittest.mock import patch

import pytest
import torch

import bagua_syncbn._ops
from bagua_syncbn._cuda import aten
from tests.helpers.aten_functions import ATEN


@pytest.fixture
def called():
    """Names of the called ATen CUDA functions, which CPU functions simulate."""
    names = []

    def noted(name):
        return lambda *arguments: (names.append(name), ATEN[name](*arguments))[1]

    with patch.multiple(torch, **{name: noted(name) for name in ATEN}):
        yield names


@pytest.fixture
def emulated(library):
    """The ops with CUDA kernels, on CPU tensors."""
    return library.ops


@pytest.fixture(params=["here", "reference", "emulated", "aten"])
def implementation(request):
    """The name and ops of an implementation: for this machine, in plain torch, the CUDA kernels, or ATen's kernels."""
    if request.param == "emulated":
        return request.param, request.getfixturevalue("emulated")
    if request.param == "aten":
        request.getfixturevalue("called")
        return request.param, aten
    if request.param == "reference":
        return request.param, bagua_syncbn._ops.reference
    return request.param, bagua_syncbn._ops


@pytest.fixture
def ops(implementation):
    return implementation[1]
