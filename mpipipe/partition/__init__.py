"""Which layers lie on which stage: torch-free layer descriptions, and three ways to cut a list of layers into
contiguous stages.
"""

from mpipipe.partition.layers import LayerDescription, ModelShape, describe_costs, describe_gpt2
from mpipipe.partition.split import Partition, make_partition, split_by_cost, split_even, split_listed

__all__ = [
    "LayerDescription",
    "ModelShape",
    "Partition",
    "describe_costs",
    "describe_gpt2",
    "make_partition",
    "split_by_cost",
    "split_even",
    "split_listed",
]
