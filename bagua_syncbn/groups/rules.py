"""Rules for groups, such as ``8``, ``"node"`` and lists of ranks, which need no process group of a running job.

A rule is the normalized form of a description that a user gives. It can be written down before a job starts, copied and
saved. In a job it stands for the ranks of this rank's own group, determined once; without a job, and in a job of one
rank, it stands for this process alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

NODE = "node"

_MOST = 8  # texts in a message, and runs of ranks in a text

Ranks: TypeAlias = tuple[int, ...]

Rule: TypeAlias = None | int | str | tuple[Ranks, ...] | Ranks
"""All ranks, a number of consecutive ranks, the ranks of this host, the list that has this rank, or these ranks."""


@dataclass(frozen=True)
class RankGroup:
    """Global ranks of a process group's members, which a copied or saved layer holds in place of its group.

    A RankGroup can be pickled, unlike a :class:`torch.distributed.ProcessGroup`. In a process without a job it stands
    for no group at all.
    """

    ranks: tuple[int, ...]


def rule_of(description: Any) -> Rule:
    """Returns the rule that an int, ``"node"``, lists of ranks or a :class:`RankGroup` state; None for other kinds.

    Raises:
        TypeError: a rank in a list is no int.
        ValueError: ``description`` is valid in no job.
    """
    if isinstance(description, RankGroup):
        return tuple(sorted(description.ranks))
    if isinstance(description, int) and not isinstance(description, bool):
        if description < 1:
            raise ValueError(f"process_group: expected at least 1 consecutive rank, got {description}")
        return description
    if isinstance(description, str) and description == NODE:
        return NODE
    if isinstance(description, (list, tuple)) and all(isinstance(ranks, (list, tuple)) for ranks in description):
        _check_lists(description)
        return tuple(map(tuple, description))
    return None


def described(rule: Rule) -> Any:
    """Returns ``rule`` in the form that users write, the inverse of :func:`rule_of`."""
    if not isinstance(rule, tuple):
        return rule
    lists: Any = rule
    return RankGroup(lists) if is_ranks(rule) else [list(ranks) for ranks in lists]


def text_of(rule: Rule) -> str:
    """Returns a description of ``rule`` for messages."""
    return "the group of all ranks" if rule is None else f"process_group={described(rule)!r}"


def text_of_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks in ascending order as in "rank 3", "ranks 0, 1" or "ranks 0-511, 513-1023".

    It names at most eight runs of ranks, and counts the ranks of all further ones.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if not runs or rank != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(rank)
    named = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:_MOST]]
    more = sum(map(len, runs[_MOST:]))
    several = "s" * (len(runs) > 1 or len(runs[0]) > 1)
    return f"rank{several} {', '.join(named)}{f' and {more} more' * (more > 0)}"


def said_by(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Returns which ranks say a text, and the text, from pairs of a rank and its text, in ascending order.

    Of more than eight texts it has the first seven.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks.setdefault(text, []).append(rank)
    said = list(ranks.items())
    if len(said) > _MOST:
        others = sorted(rank for _, which in said[_MOST - 1 :] for rank in which)
        said = [*said[: _MOST - 1], ("others", others)]
    return [(text_of_ranks(which), text) for text, which in said]


def is_ranks(rule: Rule) -> TypeGuard[Ranks]:
    """Whether ``rule`` lists the ranks of a single group."""
    return isinstance(rule, tuple) and isinstance(rule[0], int)


def check_rule(rule: Rule, rank: int, size: int) -> None:
    """Raises ValueError if ``rule`` does not fit a job of ``size`` ranks. A job of one rank fits every rule."""
    if size == 1 or rule is None or rule == NODE:
        return
    if isinstance(rule, int):
        if size % rule:
            raise ValueError(
                f"process_group: expected a number that divides the {size} ranks of the job, "
                f"got {rule}, which leaves {size % rule} of them over"
            )
    elif is_ranks(rule):
        if rank not in rule or max(rule) >= size:
            raise ValueError(
                f"process_group: expected ranks of this job that include this one, rank {rank} of {size}, got {rule}; "
                "assign the process_group attribute of the loaded layers, or convert the model again with a group of "
                "this job"
            )
    else:
        _check_lists_cover(described(rule), size)


def ranks_by_rule(rule: Rule, rank: int, size: int) -> Ranks:
    """Returns the ranks of the group of ``rank`` in a job of ``size`` ranks, by a rule other than ``"node"``."""
    if isinstance(rule, int):
        first = rank - rank % rule
        return tuple(range(first, first + rule))
    lists: Any = (rule,) if is_ranks(rule) else rule or ()
    return next((tuple(sorted(ranks)) for ranks in lists if rank in ranks), tuple(range(size)))


def _check_lists(lists: Sequence[Sequence[Any]]) -> None:
    for ranks in lists:
        for rank in ranks:
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise TypeError(f"process_group: expected lists of ranks, each an int, got {rank!r} in {lists}")
    if not lists or not all(lists):
        raise ValueError(f"process_group: expected at least one list, each of at least one rank, got {lists}")
    ranks = sorted(rank for ranks in lists for rank in ranks)
    if ranks[0] < 0:
        raise ValueError(f"process_group: expected ranks from 0 on, got {ranks[0]} in {lists}")
    for rank, following in pairwise(ranks):
        if rank == following:
            raise ValueError(f"process_group: expected each rank in one list, once, got rank {rank} twice in {lists}")


def _check_lists_cover(lists: Sequence[Sequence[int]], size: int) -> None:
    given, expected = {rank for ranks in lists for rank in ranks}, set(range(size))
    for what, ranks in (("no list for rank", expected - given), ("no such rank as", given - expected)):
        if ranks:
            numbers = ", ".join(map(str, sorted(ranks)))
            raise ValueError(
                f"process_group: expected each of the {size} ranks of the job in one list, "
                f"got {what} {numbers} in {lists}"
            )
