"""Descriptions of trees as text: the Structure of a tree, and the types of its arrays.

A Structure holds the static values themselves, for example closures with arrays. A description
holds only texts, so it can be kept without the tree, or written to a file. Each Structure has a
single description, which contains the descriptions of its children. So the descriptions of two
trees share their common parts. Sharing saves memory, and shared parts are compared by identity.
"""

import ast
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax.tree_util as jtu

from .._module import is_incomplete
from .._pytree import children_with_keys, stable_text
from ._flatten import flatten
from ._structure import (
    ARRAY,
    DictNode,
    ForeignNode,
    ListNode,
    ModuleNode,
    NamedTupleNode,
    StaticLeaf,
    Structure,
)

Kind = Literal["array", "static", "field", "tuple", "list", "dict", "namedtuple", "record"]

_MAX_SHOWN = 4
"""If a Module has more arrays than this, a text shows only their number."""

_OF_WRAPPER = "_function"
"""The field of a transformed function that holds the user's function."""


class ArrayForm(NamedTuple):
    """The type of an array, without the values. Arrays of the same type share a trace.

    - `shape`: the shape. The symbolic sizes of an exported program are strings.
    - `dtype`: the name of the dtype, such as `"float32"` or `"key<fry>"`.
    - `weak_type`: whether the dtype is weak, as for a Python number.
    - `sharding`: the mesh and the partition spec as text. A trace depends on this part of the
      sharding only.
    - `text`: JAX's text for the type. It shows everything else, such as a memory space.
    """

    shape: tuple[int | str, ...]
    dtype: str
    weak_type: bool = False
    sharding: str = "no mesh"
    text: str = ""

    @staticmethod
    def of(array: Any) -> "ArrayForm":
        """Makes the type from the shape and dtype of an array or a `jax.ShapeDtypeStruct`."""
        sizes = getattr(array, "shape", ())
        shape = tuple(size if type(size) is int else str(size) for size in sizes)
        return ArrayForm(shape, str(getattr(array, "dtype", array)))

    def __str__(self) -> str:
        weak = " (weak type)" if self.weak_type else ""
        on = "" if self.sharding == "no mesh" else f" on {self.sharding}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{weak}{on}"


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """The description of a tree without its arrays.

    - `kind`: `array` for an array, `static` for a static leaf, and `field` for a static part of a
      node, such as a static field of a Module. For a node it is the kind of container: `tuple`,
      `list`, `dict`, `namedtuple`, or `record` for any other node with named children.
    - `text`: the text of a static value, or the name of the class of a node.
    - `names`: the names of the children in a path, such as `.weight` or `['a']`; `None` for a
      sequence.
    - `children`: the children of a node, followed by its static parts; or the elements of a static
      value.
    - `value`: a tuple that contains the static value, if the value is a bool, a number, a string or
      `None`; otherwise an empty tuple.
    - `frozen`: the names of the fields in which arrays are frozen. The class of the node records
      these names.
    - `fingerprint`: a hashable value. Different static values have different fingerprints. Nodes of
      different classes also have different fingerprints. The fingerprint of a static value that is
      compared by identity is unique.
    - `advice`: the kind of static value, from which `_differences` chooses its advice.
    """

    kind: Kind
    text: str
    names: tuple[str, ...] | None = ()
    children: "tuple[Node, ...]" = ()
    value: tuple[Any, ...] = ()
    frozen: tuple[str, ...] = ()
    fingerprint: Hashable = None
    advice: str = "value"
    num_arrays: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        own = sum(child.num_arrays for child in self.children)
        self.num_arrays = 1 if self.kind == "array" else own

    @property
    def is_static(self) -> bool:
        return self.kind in ("static", "field")

    @property
    def is_node(self) -> bool:
        return self.kind not in ("array", "static", "field")

    def child_names(self) -> Iterable[str]:
        names = self.names
        return (f"[{i}]" for i in range(len(self.children))) if names is None else names


class Tree(NamedTuple):
    """A described tree: its root node, and all its arrays (or their types) in tree order."""

    node: Node
    arrays: tuple[Any, ...]

    def parts(self) -> Iterator[tuple[str, "Tree"]]:
        """The children, each with its name and its own arrays."""
        start = 0
        for name, child in zip(self.node.child_names(), self.node.children, strict=True):
            yield name, Tree(child, self.arrays[start : start + child.num_arrays])
            start += child.num_arrays

    def leaves(self) -> Iterator[tuple[str, "Tree"]]:
        """The arrays and static values, each with its path."""
        # This is not recursive, since a tree may be as deep as `flatten` allows.
        stack = [("", self)]
        while stack:
            path, tree = stack.pop()
            if tree.node.is_node:
                stack += [(path + name, part) for name, part in tree.parts()][::-1]
            else:
                yield path, tree

    def __str__(self) -> str:
        """Describes the tree in one line, such as `(float32[batch, 64], {'scale': float32[]})`.

        If a Module has many arrays, only their number is shown.
        """
        node = self.node
        if not node.is_node:
            return str(self.arrays[0]) if self.arrays else node.text
        if node.kind in ("namedtuple", "record") and len(self.arrays) > _MAX_SHOWN:
            return f"{node.text} of {len(self.arrays)} arrays"
        parts = [(name, str(part)) for name, part in self.parts() if part.node.kind != "field"]
        texts = [text for _, text in parts]
        match node.kind:
            case "tuple":
                return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
            case "list":
                return f"[{', '.join(texts)}]"
            case "dict":
                return f"{{{', '.join(f'{name[1:-1]}: {text}' for name, text in parts)}}}"
        named = (f"{key_of(name)}={text}" for name, text in parts)
        return f"{node.text}({', '.join(named)})"


def differing(first: Tree, second: Tree) -> Iterator[tuple[str, Tree | None, Tree | None]]:
    """The differences between two trees, as `(path, first part, second part)`.

    The parts are arrays, static values, or nodes of different types or with different numbers of
    children. A part that one of the trees does not have is `None`.
    """
    # This is not recursive, since a tree may be as deep as `flatten` allows.
    stack: list[tuple[str, Tree | None, Tree | None]] = [("", first, second)]
    while stack:
        path, old, new = stack.pop()
        if old is None or new is None:
            yield path, old, new
            continue
        one, other = old.node, new.node
        is_one_type = (one.kind, one.fingerprint) == (other.kind, other.fingerprint)
        has_names = one.names is not None
        if is_one_type and one.is_node and (has_names or len(one.children) == len(other.children)):
            parts, others = dict(old.parts()), dict(new.parts())
            pairs = [(path + name, parts.get(name), others.get(name)) for name in parts | others]
            # Equal pairs are dropped at once, since most parts of a large tree are usually the
            # same.
            stack += [pair for pair in pairs[::-1] if pair[1] != pair[2]]
        elif not is_one_type or one.is_node or old.arrays != new.arrays:
            yield path, old, new


def key_of(name: str) -> Any:
    """Parses a name in a path to the name of a field, or to the key of a dictionary or sequence.

    Returns `None` for a key that is not a Python literal.
    """
    if not name.startswith("["):
        return name.removeprefix(".") or _OF_WRAPPER
    try:
        return ast.literal_eval(name[1:-1])
    except (ValueError, SyntaxError):
        return None


# --- Descriptions of Structures ---


_ARRAY = Node("array", "array")

DescribeStatic = Callable[..., Node]
"""A function that describes a static value. If the value is a static part of a node (its kind is
then `field`), the function is called with `of_node=True`. If the value is a static leaf, the
function is called with the `StaticKey` of the leaf as a second argument.
"""


def root_node(names: Iterable[str], arguments: Iterable[Node]) -> Node:
    """The description of several trees with these names, such as the arguments of a call."""
    return Node("record", "arguments", tuple(names), tuple(arguments))


def describe(structure: Structure, of_static: DescribeStatic) -> Node:
    """The description of a Structure. It is made on first use and then reused."""
    # This is not recursive, since a tree may be as deep as `flatten` allows.
    stack = [structure]
    while stack:
        top = stack[-1]
        missing = [c for c in top.children if not c.is_row and of_static not in c.generated]
        if missing and of_static not in top.generated:
            stack += missing
        else:
            stack.pop()
            if of_static not in top.generated:
                # If two threads describe a Structure at once, both use the first description.
                top.generated.setdefault(of_static, _describe_one(top, of_static))
    return structure.generated[of_static]


def _describe_one(structure: Structure, of_static: DescribeStatic) -> Node:
    if structure is ARRAY:
        return _ARRAY
    if isinstance(structure, StaticLeaf):
        return of_static(structure.meta, structure.static)
    if structure.has_row:
        row = structure.children[0].meta
        places, leaves = set(row.array_places), enumerate(row.leaves)
        children = [_ARRAY if i in places else of_static(leaf) for i, leaf in leaves]
    else:
        children = [child.generated[of_static] for child in structure.children]
    kind, names, statics = _open(structure, len(children))
    children += [of_static(value, of_node=True) for value in statics.values()]
    cls: Any = structure.node_type
    is_module = isinstance(structure, ModuleNode)
    return Node(
        kind,
        cls.__name__,
        None if names is None else (*names, *statics),
        tuple(children),
        frozen=cls._eqxlike_class.traits.frozen_fields if is_module else (),
        fingerprint=identity_of(cls),
    )


def identity_of(value: Any) -> Hashable:
    """A hashable value that identifies an object. Python may reuse an `id`, but not this value."""
    try:
        reference = weakref.ref(value)
    except TypeError:
        # The value does not support weak references, so only its `id` is available. The `id` is
        # rarely reused, since the compiled function keeps the value alive.
        return id(value)
    # Python makes a single weak reference for each object. The weak reference is part of the
    # result, so that it stays alive and its own `id` is not reused.
    return id(reference), reference


def _open(
    structure: Structure, num_children: int
) -> tuple[Kind, Iterable[str] | None, dict[str, Any]]:
    """The kind of a node, the names of its children, and its static parts by name."""
    cls: Any = structure.node_type
    meta = structure.meta
    if isinstance(structure, ModuleNode) and not is_incomplete(meta):
        layout = cls._eqxlike_class.codec.layout
        names = ["" if name == _OF_WRAPPER else f".{name}" for name in layout.dynamic_names]
        return "record", names, dict(zip(map(".{}".format, layout.static_names), meta, strict=True))
    if isinstance(structure, DictNode):
        return "dict", [f"[{key!r}]" for key in meta.keys], {}
    if isinstance(structure, NamedTupleNode):
        return "namedtuple", map(".{}".format, cls._fields), {}
    if isinstance(structure, ForeignNode):
        kind = "dict" if issubclass(cls, dict) else "record"
        names = _foreign_names(meta.treedef, num_children)
        return kind, names, {" (static part)": meta.data}
    return ("list" if isinstance(structure, ListNode) else "tuple"), None, {}


def _foreign_names(treedef: Any, num_children: int) -> Iterable[str]:
    """The names of the children in a path. If the class defines no names, indices are used."""
    names: dict[str, None] = {}
    with contextlib.suppress(Exception):  # The class may reject integers as children.
        children = children_with_keys(treedef.unflatten(range(num_children)))
        names = {jtu.keystr((key,)): None for key, _ in children}
    are_names = len(names) == num_children and not any("<flat index" in name for name in names)
    return names if are_names else [f"[{i}]" for i in range(num_children)]


# --- Descriptions in files ---


def described(tree: Any) -> Tree:
    """Describes a tree by texts that are the same in every process.

    Each `jax.ShapeDtypeStruct` counts as an array.
    """
    arrays, structure = flatten(tree, with_abstract=True, by_identity=True)
    return Tree(describe(structure, describe_by_text), tuple(arrays))


def describe_by_text(value: Any, _: Any = None, *, of_node: bool = False) -> Node:
    """Describes a static value by a text that is the same in every process."""
    kept = (value,) if type(value) in (bool, int, float, str, type(None)) else ()
    return Node("field" if of_node else "static", stable_text(value), value=kept)


def to_plain(tree: Tree) -> Any:
    """Converts a tree to JSON data, with the shape and dtype of each array."""

    def plain(node: Node) -> Any:
        return [node.kind, node.text, node.names, list(map(plain, node.children)), node.value]

    return {"node": plain(tree.node), "arrays": [ArrayForm.of(array)[:2] for array in tree.arrays]}


def from_plain(plain: Any) -> Tree:
    """Converts the JSON data of `to_plain` to a tree, with the types of its arrays.

    If the data are invalid, an exception of any type is raised. `differing` can compare trees from
    different processes: it compares their classes by name, and their values by text.
    """

    def node_from(kind: Any, text: str, names: Any, children: Any, value: Any) -> Node:
        names = None if names is None else tuple(name + "" for name in names)
        parts = tuple(node_from(*each) for each in children)
        node = Node(kind, text, names, parts, (*value,), fingerprint=text + "")
        if kind not in get_args(Kind) or len([*node.child_names()]) != len(node.children):
            raise ValueError(kind)
        return node

    forms = (ArrayForm((*shape,), dtype + "") for shape, dtype in plain["arrays"])
    tree = Tree(node_from(*plain["node"]), tuple(forms))
    if len(tree.arrays) != tree.node.num_arrays:
        raise ValueError(tree)
    return tree
