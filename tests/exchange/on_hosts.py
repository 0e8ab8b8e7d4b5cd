"""Runs a rank of test_hosts.py's job over two hosts; prints the results as JSON."""

import json
import os

import torch
import torch.distributed as dist

import bagua_syncbn
from bagua_syncbn.groups import spec_of
from tests.helpers.cases import Case, compare, run_rank


def equal_one_process(process_group, ranks):
    """Compares the layer on ``ranks``, one of which has no samples, with one process. Returns the communicator."""
    case = Case(tuple(0 if rank == 1 else rank + 2 for rank in ranks), (64, 5, 5), torch.float64)
    results = [None] * len(ranks)
    result = run_rank(case, process_group, ranks.index(dist.get_rank()))
    dist.all_gather_object(results, result, bagua_syncbn.sync_group(process_group) if process_group else None)
    compare(case, results)
    return type(spec_of(process_group).communicator()).__name__


torch.set_num_threads(1)
dist.init_process_group("gloo")
node, size = spec_of("node").members(), dist.get_world_size()
answer = {
    "rank": dist.get_rank(),
    "host": os.environ["GROUP_RANK"],
    "node": node,
    "over hosts": equal_one_process(None, range(size)),
    "on a host": equal_one_process("node", node),
}
os.write(1, f"{json.dumps(answer)}\n".encode())  # a single write, because the ranks on a host share a pipe
dist.destroy_process_group()
