"""Policies: the dtypes in which a model stores its parameters, computes, and answers."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import Module, field
from ..._pytree import is_array
from ._match import Match, node_predicate

_ROLES = {"params": "parameter", "compute": "compute", "output": "output"}
_ALIASES = {"p": "params", "c": "compute", "o": "output"}
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
"""The names of dtypes as JAX prints them. NumPy counts bytes: its "f16" is a float of 128 bits."""


def _as_dtype(dtype: Any) -> Any:
    """The dtype; what was given if it is none, for `Policy` to say in which place."""
    if isinstance(dtype, str):
        dtype = _SHORT.get(dtype, dtype)
    try:
        # NumPy takes None for float64, which nobody means here.
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        return dtype


class Policy(Module):
    """The dtypes of a computation in mixed precision; `MixedPrecision` applies them to a model.

    - `parameter_dtype`: in which parameters are stored, differentiated and updated.
    - `compute_dtype`: in which the model computes.
    - `output_dtype`: of what the model returns.

    Micikevicius et al. (2018), "Mixed Precision Training", store and update in float32 and compute
    in a dtype of 16 bits. With bfloat16, of the range of float32, that is all; gradients in float16
    underflow unless the loss is scaled, see `train.DynamicLossScale`.

    A dtype may be given by name, as "bfloat16" or, the way JAX prints it, "bf16".

    Its methods cast the floating-point arrays in a pytree. Integers, booleans, complex numbers,
    keys and whatever is no array stay as they are. What **keeps its precision** is not cast either:

    - a node whose class says `keeps_precision: ClassVar[bool] = True`, as the norm layers do. Write
      it in a class of your own, be it a layer or a state that is handed from call to call;
    - a node that `keep` chooses: a type, several, or a function from a node of the tree to `bool`,
      which is asked from the root down.

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
            if not _is_floating_dtype(dtype):
                shown = dtype.name if isinstance(dtype, jnp.dtype) else repr(dtype)
                raise ValueError(
                    f"Policy expected a floating-point dtype of JAX as {role}_dtype, such as "
                    f"'float32' or 'bfloat16'; got {shown}."
                )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """The policy that a string, of a configuration file say, describes; as in DeepMind's jmp.

        **Arguments:**

        - `text`: either one dtype, which holds for all three; or as in
          `"params=float32,compute=bfloat16,output=float32"`, of which the first letters suffice.
          Of these, `params` is float32 where it is left out, `compute` is as `params`, and
          `output` as `compute`.

        **Raises:** `ValueError` for what does not read like this.

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
                    "A policy reads like 'params=float32,compute=bfloat16,output=float32', each "
                    f"name once at most; got {part.strip()!r} in {text!r}."
                )
            found[name] = dtype
        parameter = found.get("params", "float32")
        compute = found.get("compute", parameter)
        return cls(parameter, compute, found.get("output", compute))

    def cast_to_parameter(self, tree: PyTree, *, keep: Match = ()) -> PyTree:
        """`tree` with its floating-point arrays in `parameter_dtype`.

        In what keeps its precision, arrays of fewer bytes are cast as well: they may grow, but not
        shrink. What has a policy of its own is stored as that says.
        """
        return jtu.tree_map(
            lambda node: _widen(node, self.parameter_dtype),
            _cast(tree, self.parameter_dtype, keep),
            is_leaf=_has_policy,
        )

    def cast_to_compute(self, tree: PyTree, *, keep: Match = ()) -> PyTree:
        """`tree` with its floating-point arrays in `compute_dtype`."""
        return _cast(tree, self.compute_dtype, keep)

    def cast_to_output(self, tree: PyTree, *, keep: Match = ()) -> PyTree:
        """`tree` with its floating-point arrays in `output_dtype`."""
        return _cast(tree, self.output_dtype, keep)


def _cast(tree: PyTree, dtype: Any, keep: Match) -> PyTree:
    """`tree` with the floating-point arrays outside of what keeps its precision in `dtype`."""
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


def _is_floating_dtype(dtype: Any) -> bool:
    # A float of more than 64 bits is one to NumPy, and none to JAX.
    is_floating = isinstance(dtype, jnp.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return is_floating and dtype.itemsize <= 8


def _has_policy(node: Any) -> bool:
    return isinstance(getattr(node, "policy", None), Policy)
