"""The recipe of docs/troubleshooting.md for ranks that run out of data: as one process that saw the same samples."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import make_model, make_optimizer

from bagua_syncbn import convert_sync_batchnorm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
BATCHES = (5, 3, 0)  # of each rank, and of 2, 3 and 4 samples


def own_batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(rank + 2, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(BATCHES[rank])]


def train(model, batches, scale):
    optimizer = make_optimizer(model)
    for batch in batches:
        loss = model(batch).sin().mean(1).sum() * scale(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def on_a_rank():
    recipe = {"torch": torch, "dist": dist}
    exec(
        re.search(r"^def until_all_are_done.*?\n\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[0],
        recipe,
    )

    def scale(batch):
        total = torch.tensor(len(batch))
        dist.all_reduce(total)
        return dist.get_world_size() / total.item()

    model = convert_sync_batchnorm(make_model())
    batches = recipe["until_all_are_done"](own_batches(dist.get_rank()), torch.empty(0, 3, 8, 8, dtype=torch.float64))
    train(DistributedDataParallel(model), batches, scale)
    return model.state_dict()


def test_ranks_that_have_run_out_go_on_with_empty_batches(pool):
    ranks = [own_batches(rank) for rank in range(3)]
    together = [torch.cat([batches[step] for batches in ranks if step < len(batches)]) for step in range(5)]
    model = make_model()
    train(model, together, lambda batch: 1 / len(batch))
    for state in pool.run(on_a_rank, 3):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-9, atol=1e-9)
