"""The cost of synchronization in jobs larger than this machine: a model, what it assumes, and how far it is off.

fit.py          latency and bandwidth of gloo's collectives, from the measured ones
networks.py     the collectives of NCCL by its own cost model: NVLink in a node, InfiniBand between nodes
model.py        a training step: global groups against a group per node
measured.py     what the model says of the training steps that were measured
published.py    what the model says of cases with published figures
"""
