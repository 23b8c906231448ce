"""Mixed precision: policies for the dtypes of parameters, computation and outputs."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import Module, field
from ..._pytree import is_array
from .._inputs import check_instance
from .._stateful import StatefulLayer, is_stateful
from ._replace import Match, node_predicate

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
