"""Mixed precision: a model under a policy."""

from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import PyTree

from ..._module import field
from .._common import check_instance
from .._stateful import StatefulLayer, is_stateful
from ._match import Match
from ._policy import Policy


class MixedPrecision(StatefulLayer):
    """A model that stores its parameters in one dtype and computes in another.

    It is called like the model. At each call the floating-point arrays of the model and of the
    arguments are cast to `policy.compute_dtype`, and those that come back to `policy.output_dtype`.
    Gradients with respect to it have the dtypes of the parameters, and an optimiser sees nothing
    else; a file that it is written to is that of the model inside.

    **Norms and softmax stay in float32.** What keeps its precision, as `Policy` says, is not cast;
    that goes for arguments and results too, such as a state. Norm layers keep theirs: beside
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
        - `keep`: what is not cast, beside the nodes whose class says `keeps_precision`: a type,
          several, or a function from a node of the tree to `bool`.

        **Raises:** `TypeError` if `policy` is neither policy nor string, `keep` neither type nor
        function, or `model` a class; `ValueError` for a string that is no policy.
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
        return self.call(_call, *args, **kwargs)

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


def _call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)
