"""Which communicator a process group argument leads to, and backends that lack an operation."""

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn import SyncBatchNorm
from bagua_syncbn.communicators import LOCAL, Communicator, RankGroup, resolve_communicator


def test_without_a_job_everyone_is_alone():
    for process_group in (None, LOCAL, RankGroup((0, 1))):
        communicator = resolve_communicator(process_group)
        assert (communicator.size, communicator.rank) == (1, 0)
        assert isinstance(communicator, Communicator)


@pytest.mark.parametrize(
    ("process_group", "named"),
    [("host", "'host'"), (2.0, "float"), (True, "bool"), ([0, 1], "list"), (object(), "object")],
)
def test_what_is_no_group_is_named(process_group, named):
    for use in (resolve_communicator, lambda group: SyncBatchNorm(2, process_group=group)):
        with pytest.raises(TypeError, match=f"process_group: expected .* got {named}$"):
            use(process_group)


def exchange(process_group):
    communicator = resolve_communicator(process_group)
    packed = torch.arange(3.0) + 10 * communicator.rank
    gathered = communicator.all_gather(packed)
    return communicator.size, communicator.rank, gathered.tolist(), communicator.all_reduce(packed.clone()).tolist()


def test_default_group(pool):
    rows = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0], [20.0, 21.0, 22.0]]
    for rank, result in enumerate(pool.run(exchange, 3, None)):
        assert result == (3, rank, rows, [30.0, 33.0, 36.0])


kept = []


def exchange_by_ranks():
    # Only the members resolve it: rank 1 is elsewhere meanwhile.
    if dist.get_rank() == 1:
        return None
    first = exchange(RankGroup((0, 2)))
    assert RankGroup((0, 2)).resolve() is RankGroup((0, 2)).resolve()
    kept.append(RankGroup((0, 2)).resolve())  # outlives its job, as a group in a variable does
    assert dist.get_process_group_ranks(kept[-1]) == [0, 2]  # raises for a group of a job that has ended
    return first


def test_a_group_by_ranks_is_made_by_its_members_alone(pool):
    for _ in range(2):  # the second job must not meet the groups of the first
        first, nobody, second = pool.run(exchange_by_ranks, 3)
        assert nobody is None
        assert first == (2, 0, [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]], [10.0, 12.0, 14.0])
        assert second[:2] == (2, 1)
        pool.run(exchange, 2, None)


def resolve_impossible_ranks():
    errors = []
    for ranks in ((0, 5), (1 - dist.get_rank(),)):
        try:
            resolve_communicator(RankGroup(ranks))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_this_job_does_not_have_are_named(pool):
    for rank, errors in enumerate(pool.run(resolve_impossible_ranks, 2)):
        assert len(errors) == 2
        assert all(f"expected ranks of this job that include this one, rank {rank} of 2" in error for error in errors)


def exchange_where_single_all_gather_raises(message):
    import bagua_syncbn.communicators.c10d as c10d

    calls = []

    def unsupported(output, input, group=None):
        calls.append(group)
        raise RuntimeError(message)

    single, c10d._all_gather_single = c10d._all_gather_single, unsupported
    try:
        group = dist.new_group([0, 1])
        return [exchange(group)[2], exchange(group)[2]], len(calls)
    except RuntimeError as error:
        return str(error), len(calls)
    finally:
        c10d._all_gather_single = single


def test_a_backend_that_gathers_into_a_list_only(pool):
    message = "Backend dummy does not support allgather_into_tensor"
    for rows, calls in pool.run(exchange_where_single_all_gather_raises, 2, message):
        assert rows == [[[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]] * 2
        assert calls == 1  # asked once, then known


def test_other_errors_of_a_backend_come_through(pool):
    message = "connection reset by peer"
    assert pool.run(exchange_where_single_all_gather_raises, 2, message) == [(message, 1)] * 2
