"""Bagua: whether it is there, and whether it runs this job.

In a Bagua job layers talk over torch.distributed's default group, which Bagua initializes along with its own.
"""

import sys
from importlib.metadata import packages_distributions, version
from typing import Any


def installed_version() -> str | None:
    """Returns Bagua's version, or None where it is not installed; does not import it, which needs NCCL."""
    distributions = packages_distributions().get("bagua")
    return version(distributions[0]) if distributions else None


def is_initialized() -> bool:
    """Whether ``bagua.torch_api.init_process_group()`` was called in this process."""
    communication = sys.modules.get("bagua.torch_api.communication")
    return communication is not None and communication.is_initialized()


def resolve_algorithm(algorithm: Any) -> Any:
    """Returns Bagua's algorithm object for a name of its registry; an object stays as it is."""
    if not isinstance(algorithm, str):
        return algorithm
    from bagua.torch_api.algorithms import Algorithm

    return Algorithm.init(algorithm)
