"""Ranks in messages, short for any number of ranks."""

from collections.abc import Iterable

_MOST = 8  # maximum number of texts in a message, and of rank ranges in a text


def text_of_ranks(ranks: Iterable[int]) -> str:
    """Returns ascending ranks as text: "rank 3", "ranks 0, 1" or "ranks 0-511, 513-1023".

    Names at most eight ranges and counts the remaining ranks.
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


def ranks_by_text(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Groups (rank, text) pairs, in ascending order of ranks, by text; returns (ranks, text) pairs for messages.

    Returns at most eight pairs; if there are more, the last pair combines all remaining texts.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks.setdefault(text, []).append(rank)
    groups = list(ranks.items())
    if len(groups) > _MOST:
        others = sorted(rank for _, which in groups[_MOST - 1 :] for rank in which)
        groups = [*groups[: _MOST - 1], ("others", others)]
    return [(text_of_ranks(which), text) for text, which in groups]
