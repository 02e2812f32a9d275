"""Processes of a large run that write its checkpoints.

Each process that writes costs process 0 an index to merge and files to list, and the file system thousands of
small files. In runs with more processes than `train.checkpoint_writers`, groups of adjacent processes
therefore gather their shards first, and one process of each group writes them.
"""

from typing import Any

import jax

from zaya_jax.parallel.device_groups import gather_in_groups, group_mesh, meshes_of


def move_to_writers(tree: Any, limit: int | None) -> Any:
    """Moves arrays to the devices whose processes write them; all processes must call it together.

    Args:
      tree: arrays of a run on all devices.
      limit: desired maximum of processes that write; None for all.

    Returns:
      The tree; in processes that do not write, without parts of any array.
    """
    if limit is None or jax.process_count() <= limit:
        return tree
    by_groups = group_mesh(meshes_of(tree), limit)
    return tree if by_groups is None else gather_in_groups(tree, by_groups)


def has_parts(tree: Any) -> bool:
    """Whether this process has a part of any array, which it writes."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return not arrays or any(array.addressable_shards for array in arrays)
