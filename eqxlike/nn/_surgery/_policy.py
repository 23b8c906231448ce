"""Policies: the dtypes in which a model stores its parameters, computes, and answers."""

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
"""The names of dtypes as JAX prints them. NumPy counts bytes: its "f16" is a float of 128 bits."""


def _as_dtype(dtype: Any) -> Any:
    """The dtype; any other value unchanged, so that the error of `Policy` can name the place."""
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
    keys and whatever is not an array stay as they are. What **keeps its precision** is not cast
    either:

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
            is_leaf=lambda node: isinstance(getattr(node, "policy", None), Policy),
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


# --- Mixed precision: a model under a policy ---


class MixedPrecision(StatefulLayer):
    """A model that stores its parameters in one dtype and computes in another.

    It is called like the model. At each call the floating-point arrays of the model and of the
    arguments are cast to `policy.compute_dtype`, and those that come back to `policy.output_dtype`.
    Gradients with respect to it have the dtypes of the parameters, and an optimiser sees nothing
    else; a file that it is written to is that of the model inside.

    **Norms and softmax stay in float32.** What keeps its precision, as `Policy` says, is not cast;
    that goes for arguments and results too, such as a state. Norm layers keep theirs: with
    parameters in float32 they take an input of any dtype, compute in at least float32, and return
    the dtype of the input. A layer of your own that is kept does the same. One that cannot be
    changed is wrapped by itself, in a policy that computes in float32 and returns what the layers
    around it compute in: **a layer with a policy of its own keeps it inside a model with another.**
    Attention layers compute their softmax in at least float32 whatever the policy; a softmax of
    your own is a function of what it gets, so write `jax.nn.softmax(x.astype(jnp.float32))`. The
    loss, outside, is computed in `policy.output_dtype`.

    `kl_divergence` and `sample_posterior` see the parameters as they are stored: the KL is that of
    float32. A `BayesianLinear` squares its inputs, and so takes bfloat16 better than float16, in
    which the squares overflow from 256 on.

    Methods other than `__call__` are reached through `call`; `model` is the model as it is stored.

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

        Around a layer of somebody else's that is to compute in float32:

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

        - `model`: what is to be called: a Module, or any callable pytree.
        - `policy`: a `Policy`, or a string for `Policy.parse`.
        - `keep`: what is not cast, besides the nodes whose class says `keeps_precision`: a type,
          several, or a function from a node of the tree to `bool`.

        **Raises:** `TypeError` if `policy` is neither policy nor string, `keep` neither type nor
        function, or `model` a class; `ValueError` for a string that is not a policy.
        """
        check_instance(model, "MixedPrecision")
        if isinstance(policy, str):
            policy = Policy.parse(policy)
        if not isinstance(policy, Policy):
            raise TypeError(
                "MixedPrecision expected as `policy` a nn.Policy, or a string such as "
                f"'params=float32,compute=bfloat16,output=float32'; got {policy!r}."
            )
        self.policy = policy
        self.model = policy.cast_to_parameter(model, keep=keep)
        self.keep = keep

    def is_stateful(self) -> bool:
        """**Returns:** whether the model takes and returns a state, as `Sequential` asks."""
        return is_stateful(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """**Arguments:** those of the model.

        **Returns:** what the model does, in `policy.output_dtype`.
        """
        return self.call(lambda model, *args, **kwargs: model(*args, **kwargs), *args, **kwargs)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(model, *args, **kwargs)` under the policy.

        **Arguments:**

        - `function`: of the model and whatever comes after it: a method by its class, such as
          `Autoencoder.encode`, or any function.

        **Returns:** what the function does, in `policy.output_dtype`.

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
