"""How a model trains and computes: frozen arrays, inference mode, and mixed precision."""

import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._module import Module, field, freeze_where
from .._pytree import flag_frozen, is_array, is_array_or_struct, is_frozen, tree_at, tree_pformat
from ._inputs import Rows, check_instance
from ._scan_stack import ScanStack
from ._stateful import StatefulLayer, is_stateful

Tree = TypeVar("Tree", bound=Any)
Where = Callable[[Any], Any | Sequence[Any]]


def freeze(model: Tree, where: Callable[[Tree], Any | Sequence[Any]] | None = None) -> Tree:
    """Freezes arrays of a model, so that they are not trained.

    - `filter_grad` and similar transformations return no gradients for frozen arrays.
    - `filter` and `partition` skip frozen arrays if the filter function selects floating-point
      arrays but no integers, as `is_inexact_array` does. An optimiser then has no moments for
      frozen arrays.
    - `apply_updates` does not change frozen arrays.

    In all other respects frozen arrays are ordinary arrays: `is_array` returns `True` for them,
    `filter_jit` traces them, methods use them, and files contain them. `jax.grad` of the whole
    model and `optax.apply_updates` ignore that an array is frozen. Freezing changes the structure
    of the tree: a Module with frozen arrays gets a new class, which is a subclass of its original
    class and has the same name.

    **Arguments:**

    - `model`: a Module, or a pytree of Modules. Only arrays in Modules can be frozen.
    - `where`: a function from the model to a node, or to a tuple or list of nodes, as in `tree_at`.
      All arrays in these nodes are frozen; by default all arrays of `model`. `where` may select
      layers of an `nn.ScanStack`, such as `model.blocks[:2]`. The stacked arrays are then split, so
      load a file of the whole stack before you freeze a part of the stack.

    **Returns:** a copy of the model with these arrays frozen. Arrays that are already frozen stay
    frozen.

    **Raises:**

    - `TypeError` if `model` is a class.
    - `ValueError` if the nodes have no array, or have an array that is not in a Module.
    - Any exception of `tree_at` for `where`.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=2, key=jax.random.key(0))
        >>> model = nn.freeze(model, lambda model: model.layers[:-1])
        >>> gradient_of = eqx.filter_jit(eqx.filter_grad(lambda model, x: model(x)[0]))
        >>> gradient = gradient_of(model, jnp.ones(2))
        >>> gradient.layers[0].weight is None, gradient.layers[-1].weight.shape
        (True, (1, 8))
    """
    check_instance(model, "freeze")
    return _set_frozen(model, where, True)


def unfreeze(model: Tree, where: Callable[[Tree], Any | Sequence[Any]] | None = None) -> Tree:
    """The inverse of `freeze`: makes the arrays of the selected nodes trainable again.

    Arguments and exceptions are as for `freeze`.

    >>> import jax
    >>> from eqxlike import nn
    >>> layer = nn.Linear(2, 2, key=jax.random.key(0))
    >>> nn.unfreeze(nn.freeze(layer)) == layer
    True
    """
    check_instance(model, "unfreeze")
    return _set_frozen(model, where, False)


def _set_frozen(model: PyTree, where: Where | None, value: bool) -> PyTree:
    where = (lambda model: model) if where is None else where
    nodes = jtu.tree_leaves(model, is_leaf=lambda node: node is where)
    if not callable(where) or isinstance(where, type) or any(node is where for node in nodes):
        raise TypeError(
            "`where` must be a function from the model to the nodes to freeze or unfreeze, such as "
            f"`lambda model: model.layers[0]`; got {tree_pformat(where)}."
        )
    nodes, treedef = jtu.tree_flatten(model, is_leaf=_is_stack)
    rows = _choose_rows(where, nodes, treedef)
    if rows is None:
        tree_at(where, model, replace_fn=lambda node: node)  # Raises the error for `where`.
        rows = []
    if not any(map(np.any, rows)):
        raise ValueError("The nodes that `where` selects have no arrays.")
    are_chosen: list[bool] = []
    layers: dict[int, list[Any]] = {}
    for place, (node, table) in enumerate(zip(nodes, rows, strict=True)):
        is_whole = (table.all(1) == table.any(1)).all()
        if is_whole and (not _is_stack(node) or len(node.runs()) == 1):
            are_chosen += [bool(row.all()) for row in table]
        else:
            are_chosen += [False] * len(jtu.tree_leaves(node))
            layers[place] = [
                _with_flags(layer, flags, value)
                for layer, flags in zip(node.unstack(), table.T, strict=True)
            ]
    nodes, treedef = jtu.tree_flatten(_with_flags(model, are_chosen, value), is_leaf=_is_stack)
    for place, each in layers.items():
        nodes[place] = nodes[place].with_layers(each)
    return treedef.unflatten(nodes)


def _with_flags(model: PyTree, are_chosen: Sequence[bool], value: bool) -> PyTree:
    """`model` with the chosen leaves frozen, or unfrozen if `value` is `False`."""
    flags = [
        value if is_chosen else flag
        for is_chosen, flag in zip(are_chosen, flag_frozen(model), strict=True)
    ]
    new = freeze_where(model, jtu.tree_structure(model).unflatten(flags))
    for (path, _), flag, is_now in zip(
        jtu.tree_leaves_with_path(model), flags, flag_frozen(new), strict=True
    ):
        if flag != is_now:
            raise ValueError(
                f"The array at model{jtu.keystr(path)} is not in a Module, so it cannot be "
                "frozen: make it a field of a Module."
            )
    return new


def _is_stack(node: Any) -> bool:
    return isinstance(node, ScanStack)


def _choose_rows(where: Where, nodes: list[Any], treedef: Any) -> list[np.ndarray] | None:
    """Returns a boolean table for each node. An entry is `True` if `where` chooses it.

    A node is a leaf or a `ScanStack`. The table of a node has one row for each leaf and one column
    for each layer. `where` is called on a tree with a number for each leaf and layer, so that
    `where` can choose layers of a stack, or rows of its arrays. The result is `None` if `where`
    fails, or returns anything but these numbers.
    """
    tables, shown, count = [], [], 0
    for node in nodes:
        layers, depth = (node.runs()[0][0].layers, node.depth) if _is_stack(node) else (node, 1)
        leaves, structure = jtu.tree_flatten(layers)
        table = count + np.arange(len(leaves) * depth).reshape(len(leaves), depth)
        count += table.size
        tables.append((table, np.array(list(map(is_array_or_struct, leaves)), bool)[:, None]))
        view = structure.unflatten(map(Rows, table))
        shown.append(node._storing(view, depth) if _is_stack(node) else Rows(table[0, 0]))
    try:
        chosen = jtu.tree_leaves(where(treedef.unflatten(shown)))
        numbers = np.concatenate([np.ravel(leaf.numbers) for leaf in chosen])
    except Exception:
        return None
    return [np.isin(table, numbers) & is_array for table, is_array in tables]


# --- Training and inference mode ---


def _flags(pytree: PyTree) -> list[Any]:
    """Every `inference` attribute in the tree."""
    flags = []

    def visit(node: Any) -> bool:
        # Skips leaves with an attribute `inference`, such as a class or an object of another
        # library.
        if hasattr(node, "inference") and not jtu.all_leaves([node]):
            flags.append(node.inference)
        return False

    jtu.tree_leaves(pytree, is_leaf=visit)
    return flags


def inference_mode(pytree: Tree, value: bool = True) -> Tree:
    """Sets every `inference` attribute in a pytree, including the attributes of your own Modules.

    **Arguments:**

    - `pytree`: a model, or any pytree with Modules in it.
    - `value`: `True` for inference, `False` for training.

    **Returns:** a copy with the flags set.

    **Raises:** `TypeError` if `pytree` is a class; any exception of `tree_at` if an `inference`
    attribute is not an ordinary field, but a property, method, class attribute or static field.

    >>> from eqxlike import nn
    >>> model = nn.Sequential([nn.Dropout(), nn.Identity()])
    >>> inference_mode(model)[0].inference
    True
    >>> inference_mode(inference_mode(model), value=False)[0].inference
    False
    """
    check_instance(pytree, "inference_mode")
    count = len(_flags(pytree))
    if count == 0:
        return pytree
    try:
        return tree_at(_flags, pytree, [value] * count, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        error.add_note(
            "`inference_mode` replaces the attribute `inference` of every node that has one: it "
            "must be an ordinary field, neither static nor a method."
        )
        raise


tree_inference = inference_mode


# --- Selection of nodes by type or function ---


Match = type | types.UnionType | tuple[type, ...] | Callable[[Any], Any]
"""A type, a tuple of types, or a function from a node of the tree to `bool`."""


def node_predicate(match: Match, name: str) -> Callable[[Any], bool]:
    """Converts `match` to a function from a node to `bool`.

    `name` is the name of the argument in the error message.

    The wrapper around a frozen array never matches, because it is not a node of the user's tree.

    **Raises:** `TypeError` if `match` is not a type, a tuple of types or a function.
    """
    node_types: Any = match if isinstance(match, tuple) else (match,)
    if all(isinstance(each, type | types.UnionType) for each in node_types):
        return lambda node: not is_frozen(node) and isinstance(node, node_types)
    if callable(match):
        return lambda node: not is_frozen(node) and bool(match(node))
    raise TypeError(
        f"`{name}` must be a type, a tuple of types, or a function from a node of the tree to a "
        f"bool; got {match!r}."
    )


# --- Mixed precision ---


_ROLES = {"params": "parameter", "compute": "compute", "output": "output"}
_ALIASES = {"p": "params", "c": "compute", "o": "output"}
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
"""The short names of dtypes that JAX prints. NumPy's short names count bytes: "f16" has 128 bits.
"""


def _as_dtype(dtype: Any) -> Any:
    """Converts a dtype. Returns an invalid value unchanged, so that `Policy` raises the error."""
    if isinstance(dtype, str):
        dtype = _SHORT.get(dtype, dtype)
    try:
        # NumPy converts None to float64.
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        return dtype


class Policy(Module):
    """The dtypes of a mixed-precision computation; `MixedPrecision` applies them to a model.

    - `parameter_dtype`: dtype in which parameters are stored, differentiated and updated.
    - `compute_dtype`: dtype in which the model computes.
    - `output_dtype`: dtype of the outputs of the model.

    A dtype may be given by name, such as "bfloat16", or as JAX prints it, such as "bf16".

    The methods cast the floating-point arrays in a pytree. Integers, booleans, complex numbers,
    random keys and leaves that are not arrays are not changed. Nodes that **keep their precision**
    are not cast either:

    - nodes whose class defines `keeps_precision: ClassVar[bool] = True`, such as norm layers. You
      can define this attribute in classes of your own;
    - nodes that `keep` chooses: a type, a tuple of types, or a function from a node of the tree to
      `bool`. The function is called on outer nodes before inner nodes.

    Micikevicius et al. (2018), "Mixed Precision Training", store and update parameters in float32
    and compute in 16 bits. bfloat16 has the range of float32, so it needs no loss scaling. In
    float16, gradients underflow unless the loss is scaled; see `train.DynamicLossScale`.

    !!! example

        >>> import jax.numpy as jnp
        >>> policy = Policy.parse("params=float32,compute=bfloat16,output=float32")
        >>> policy == Policy(jnp.float32, jnp.bfloat16, jnp.float32)
        True
        >>> cast = policy.cast_to_compute({"x": jnp.ones(3), "index": jnp.arange(3)})
        >>> cast["x"].dtype.name, cast["index"].dtype.name
        ('bfloat16', 'int32')
    """

    parameter_dtype: Any = field(static=True, converter=_as_dtype)
    compute_dtype: Any = field(static=True, converter=_as_dtype)
    output_dtype: Any = field(static=True, converter=_as_dtype)

    def __check_init__(self) -> None:
        for role in _ROLES.values():
            dtype = getattr(self, f"{role}_dtype")
            is_floating = isinstance(dtype, jnp.dtype) and jnp.issubdtype(dtype, jnp.floating)
            # NumPy has floats of more than 64 bits, but JAX has none.
            if not is_floating or dtype.itemsize > 8:
                shown = dtype.name if isinstance(dtype, jnp.dtype) else repr(dtype)
                raise ValueError(
                    f"Policy expected {role}_dtype to be a floating-point dtype of JAX, such as "
                    f"'float32' or 'bfloat16'; got {shown}."
                )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Parses a policy from a string, for example from a configuration file, like DeepMind's
        jmp.

        **Arguments:**

        - `text`: one dtype for all three roles, or a list such as
          `"params=float32,compute=bfloat16,output=float32"`. The names may be shortened to `p`,
          `c` and `o`. The defaults are float32 for `params`, `params` for `compute`, and `compute`
          for `output`.

        **Raises:** `ValueError` if `text` has another format.

        >>> Policy.parse("p=float32,c=float16") == Policy("float32", "float16", "float16")
        True
        """
        if "=" not in text:
            return cls(text, text, text)
        found: dict[str, str] = {}
        for part in text.split(","):
            name, _, dtype = (piece.strip() for piece in part.partition("="))
            name = _ALIASES.get(name, name)
            if name not in _ROLES or name in found:
                raise ValueError(
                    "A policy string has the format 'params=float32,compute=bfloat16,"
                    "output=float32', with each name at most once; got "
                    f"{part.strip()!r} in {text!r}."
                )
            found[name] = dtype
        parameter = found.get("params", "float32")
        compute = found.get("compute", parameter)
        return cls(parameter, compute, found.get("output", compute))

    def cast_to_parameter(self, tree: PyTree, *, keep: Match = ()) -> PyTree:
        """Casts the floating-point arrays in `tree` to `parameter_dtype`.

        In nodes that keep their precision, narrower arrays are widened to `parameter_dtype`, and
        wider arrays are not changed. Nodes with their own policy are not changed.
        """
        return jtu.tree_map(
            lambda node: _widen(node, self.parameter_dtype),
            _cast(tree, self.parameter_dtype, keep),
            is_leaf=lambda node: isinstance(getattr(node, "policy", None), Policy),
        )

    def cast_to_compute(self, tree: PyTree, *, keep: Match = ()) -> PyTree:
        """Casts the floating-point arrays in `tree` to `compute_dtype`."""
        return _cast(tree, self.compute_dtype, keep)

    def cast_to_output(self, tree: PyTree, *, keep: Match = ()) -> PyTree:
        """Casts the floating-point arrays in `tree` to `output_dtype`."""
        return _cast(tree, self.output_dtype, keep)


def _cast(tree: PyTree, dtype: Any, keep: Match) -> PyTree:
    """Casts the floating-point arrays in `tree`, except in nodes that keep their precision."""
    is_chosen = node_predicate(keep, "keep")

    def keeps_precision(node: Any) -> bool:
        return getattr(type(node), "keeps_precision", False) or is_chosen(node)

    def convert(node: Any) -> Any:
        is_cast = not keeps_precision(node) and _is_floating(node) and node.dtype != dtype
        return jax.lax.convert_element_type(node, dtype) if is_cast else node

    return jtu.tree_map(convert, tree, is_leaf=keeps_precision)


def _widen(node: Any, dtype: Any) -> Any:
    is_narrow = _is_floating(node) and node.dtype.itemsize < dtype.itemsize
    return jax.lax.convert_element_type(node, dtype) if is_narrow else node


def _is_floating(node: Any) -> bool:
    return is_array(node) and jnp.issubdtype(node.dtype, jnp.floating)


# --- Models in mixed precision ---


class MixedPrecision(StatefulLayer):
    """Wraps a model. The wrapper stores the parameters in one dtype and computes in another.

    Call the wrapper like the model. Each call casts the floating-point arrays of the model and of
    the arguments to `policy.compute_dtype`, and the outputs to `policy.output_dtype`. Gradients and
    the state of an optimiser have the dtypes of the parameters. Saved files are identical to files
    of the wrapped model, `model`. Use `call` for methods other than `__call__`.

    **Norms and softmax stay in float32.** Nodes that keep their precision (see `Policy`) are not
    cast. Such nodes in arguments and outputs, for example in a state, are not cast either. Norm
    layers keep their precision: with float32 parameters they accept an input of any dtype, compute
    in at least float32, and return the dtype of the input. If your own layers keep their precision,
    write them so that they do the same. If you cannot change a layer, wrap it in its own
    `MixedPrecision` that computes in float32 and returns the compute dtype of the model: **the
    policy of an inner layer takes precedence.** Attention layers always compute their softmax in at
    least float32. For other softmax functions, write `jax.nn.softmax(x.astype(jnp.float32))`. The
    loss outside of the model is computed in `policy.output_dtype`.

    `kl_divergence` and `sample_posterior` use the stored parameters, so the KL divergence is
    computed in the dtype of these parameters. A `BayesianLinear` squares its inputs: use bfloat16,
    because in float16 squares overflow for inputs of 256 or more.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> linear = nn.Linear(2, 2, key=jax.random.key(0))
        >>> model = nn.Sequential([linear, nn.LayerNorm(2)])
        >>> mixed = MixedPrecision(model, Policy("float32", "bfloat16", "float32"))
        >>> def loss(mixed, x):
        ...     return jnp.sum(mixed(x) ** 2)
        >>> gradient = eqx.filter_jit(eqx.filter_grad(loss))(mixed, jnp.ones(2))
        >>> gradient.model[0].weight.dtype.name
        'float32'

        A layer that computes in float32 inside of a model in bfloat16:

        >>> in_float32 = Policy("float32", "float32", "bfloat16")
        >>> def wrap(layer):
        ...     return MixedPrecision(layer, in_float32)
        >>> mixed = MixedPrecision(nn.replace_layers(model, nn.LayerNorm, wrap), mixed.policy)
        >>> mixed(jnp.ones(2)).dtype.name
        'float32'
    """

    model: Any
    policy: Policy
    keep: Any = field(static=True)
    keeps_precision: ClassVar[bool] = True

    def __init__(self, model: PyTree, policy: Policy | str, *, keep: Match = ()):
        """**Arguments:**

        - `model`: a Module or any callable pytree.
        - `policy`: a `Policy`, or a string for `Policy.parse`.
        - `keep`: further nodes that keep their precision: a type, a tuple of types, or a function
          from a node of the tree to `bool`.

        **Raises:**

        - `TypeError` if `policy` is neither a `Policy` nor a string.
        - `TypeError` if `keep` is neither a type, nor a tuple of types, nor a function.
        - `TypeError` if `model` is a class.
        - `ValueError` if the string has another format.
        """
        check_instance(model, "MixedPrecision")
        if isinstance(policy, str):
            policy = Policy.parse(policy)
        if not isinstance(policy, Policy):
            raise TypeError(
                "MixedPrecision expected `policy` to be an nn.Policy or a string such as "
                f"'params=float32,compute=bfloat16,output=float32'; got {policy!r}."
            )
        self.policy = policy
        self.model = policy.cast_to_parameter(model, keep=keep)
        self.keep = keep

    def is_stateful(self) -> bool:
        """**Returns:** whether the model takes and returns a state."""
        return is_stateful(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """**Arguments:** the arguments of the model.

        **Returns:** the output of the model, in `policy.output_dtype`.
        """
        return self.call(lambda model, *args, **kwargs: model(*args, **kwargs), *args, **kwargs)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `function(model, *args, **kwargs)` under the policy.

        **Arguments:**

        - `function`: a function whose first argument is the model, such as the method
          `Autoencoder.encode`.
        - `*args`, `**kwargs`: further arguments of `function`.

        **Returns:** the output of the function, in `policy.output_dtype`.

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
        >>> mixed = MixedPrecision(model, "params=float32,compute=bfloat16")
        >>> mixed.call(lambda model, x: model.layers[0](x), jnp.ones(2)).dtype.name
        'bfloat16'
        """
        model, args, kwargs = self.policy.cast_to_compute(
            (self.model, args, kwargs), keep=self.keep
        )
        return self.policy.cast_to_output(function(model, *args, **kwargs), keep=self.keep)
