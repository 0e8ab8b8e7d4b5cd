"""Ranks that claim to be on several hosts."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn.communicators import TorchCommunicator, hosts, shared
from tests.helpers.own_groups import communicator_of

needs_shared_memory = pytest.mark.skipif(bool(shared.problem()), reason=shared.problem() or "none")
COMMUNICATORS = {True: shared.SharedCommunicator, False: hosts.HostsCommunicator}


def over(places, group=None, **options):
    """Returns the layers' communicator of a group whose rank r is on host ``places[r]``, as in "aabb"."""
    with patch.object(hosts, "host_name", lambda: (places[dist.get_rank()], "")):
        return communicator_of(group or dist.new_group(**options))


def is_over(places, communicator):
    """Returns whether ranks on hosts ``places`` use shared memory."""
    return type(communicator) is COMMUNICATORS[len(set(places)) == 1]


def have_same_bits(value):
    rows = TorchCommunicator(dist.group.WORLD).all_gather(value.contiguous().view(-1).clone())
    return all(torch.equal(row, rows[0]) for row in rows)
