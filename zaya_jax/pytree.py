"""Frozen dataclasses that JAX can look into, and trees of shapes in place of arrays."""

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import jax

Class = TypeVar("Class", bound=type)


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes, types and shardings of a tree's arrays, without allocating.

    Args:
      tree: of arrays, or of their shapes.
      shardings: a tree of them, or a prefix of one: a single sharding is that of all arrays.
    """

    def place(sharding: Any, arrays: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)

    return jax.tree.map(place, shardings, tree)


def static(**options: Any) -> Any:
    """A field that is part of the tree's structure, not of its leaves."""
    return dataclasses.field(metadata={"static": True}, **options)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: Class) -> Class:
    """Makes a class a frozen dataclass and registers it as a pytree.

    Trees of the same class also hold shapes, shardings or axes in place of arrays. They are built
    without `__init__`, where annotations of arrays are checked under pytest.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)
    leaves = tuple(field.name for field in fields if not field.metadata.get("static"))
    statics = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in leaves]
        return children, tuple(getattr(tree, name) for name in statics)

    def unflatten(structure: tuple[Any, ...], children: Iterable[Any]) -> Any:
        tree = object.__new__(cls)
        names_and_values = zip(leaves + statics, (*children, *structure), strict=True)
        for name, value in names_and_values:
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls
