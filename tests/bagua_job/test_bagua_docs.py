"""Runs each block of the documentation that needs Bagua as a script on two ranks."""

import os

import torch
import torch.distributed as dist

from tests.tools.test_docs import NEEDS_BAGUA, blocks_with


def run_blocks(directory):
    import bagua.torch_api

    from tests.bagua_job.native import reset

    os.chdir(directory)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device = lambda device: None
    initialize = bagua.torch_api.communication.init_process_group
    blocks = blocks_with(NEEDS_BAGUA)
    for number, block in enumerate(blocks):
        reset()
        store = dist.FileStore(f"{directory}/store{number}", size)
        bagua.torch_api.init_process_group = lambda store=store: initialize(store, rank, size, size)
        exec(block.code, {"__name__": "__main__"})
    return [block.name for block in blocks]


def test_the_scripts_of_the_documentation_run(pool, tmp_path):
    done = pool.run(run_blocks, 2, str(tmp_path))
    pool.close()  # these ranks are still in the last script's job
    assert done[0] == done[1] == [block.name for block in blocks_with(NEEDS_BAGUA)]
    assert len(done[0]) >= 2
