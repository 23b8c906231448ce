"""The comparison of static values, and of trees, by whether one trace serves for both."""

from typing import Any

from jaxtyping import PyTree

from .._pytree import Difference, children_with_keys
from ._flatten import flatten
from ._static_key import StaticKey, is_hashable


def is_same_static(first: Any, second: Any) -> bool:
    """Whether two static leaves are interchangeable in a trace at this moment.

    They are compared as `filter_jit` compares them: by type and value; functions, and leaves that
    are not hashable, by identity.

    >>> import jax
    >>> is_same_static(1, 1), is_same_static(1, True), is_same_static(1, 1.0)
    (True, False, False)
    >>> is_same_static(lambda x: x, lambda x: x), is_same_static(jax.nn.relu, jax.nn.relu)
    (False, True)
    """
    if first is second:
        return True
    # Both are held while their keys are compared: keys name objects by their `id`.
    keys = [StaticKey(each, by_identity=not is_hashable(each)) for each in (first, second)]
    return keys[0].key == keys[1].key


def find_static_difference(first: PyTree, second: PyTree) -> Difference | None:
    """The first place at which two trees differ in more than their arrays, whatever these are.

    It is a static leaf; or a node that is of another type, has other children or other static
    fields. `None` if one trace serves for both trees.

    >>> import jax
    >>> from jax.tree_util import keystr
    >>> found = find_static_difference({"a": 1.0, "b": (2, 3)}, {"a": 1.0, "b": (2, True)})
    >>> keystr(found.path), found.first, found.second
    ("['b'][1]", 3, True)
    """
    structures = [flatten(tree, is_bound=True)[1] for tree in (first, second)]
    if structures[0] is structures[1]:
        return None
    children, others = children_with_keys(first), children_with_keys(second)
    if type(first) is type(second) and [key for key, _ in children] == [key for key, _ in others]:
        for (key, child), (_, other) in zip(children, others, strict=True):
            if found := find_static_difference(child, other):
                return found._replace(path=(key, *found.path))
    return Difference((), first, second)
