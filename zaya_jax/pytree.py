"""Frozen dataclasses that are pytrees, and trees of array shapes."""

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import jax

Class = TypeVar("Class", bound=type)


def abstract(tree: Any, shardings: Any) -> Any:
    """Returns a tree of `jax.ShapeDtypeStruct` with shardings, without allocating arrays.

    Args:
      tree: tree of arrays or of their shapes.
      shardings: tree of shardings, or a prefix of one: a single sharding applies to all arrays.
    """

    def place(sharding: Any, arrays: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)

    return jax.tree.map(place, shardings, tree)


def static(**options: Any) -> Any:
    """Declares a field that is part of the tree's structure: a change of it compiles the program again."""
    return dataclasses.field(metadata={"static": True}, **options)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: Class) -> Class:
    """Makes a class a frozen dataclass and registers it as a pytree.

    Instances can also contain shapes, shardings or axes instead of arrays.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)
    leaves = tuple(field.name for field in fields if not field.metadata.get("static"))
    statics = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in leaves]
        return children, tuple(getattr(tree, name) for name in statics)

    def unflatten(structure: tuple[Any, ...], children: Iterable[Any]) -> Any:
        # Bypass `__init__`: under pytest it checks annotations, and leaves are not arrays in every tree.
        tree = object.__new__(cls)
        names_and_values = zip(leaves + statics, (*children, *structure), strict=True)
        for name, value in names_and_values:
            object.__setattr__(tree, name, value)
        return tree

    # With keys, error messages of JAX name the field instead of an index.
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls
