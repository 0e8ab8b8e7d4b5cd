"""Algorithms where Bagua's code imports them from, ``bagua.torch_api.algorithms``: those that torch's engine has."""

from . import gradient_allreduce

__all__ = ["gradient_allreduce"]
