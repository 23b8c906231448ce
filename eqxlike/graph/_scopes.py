"""The path of a layer, read off the stack of names under which something was traced."""

import re

_TOKEN = re.compile(r"([^/()]+)(\(?)")
# Scopes of JAX's own.
_OF_JAX = frozenset({"checkpoint", "rematted_computation"})
# `jnp.einsum` names its products by their indices.
_INDICES = re.compile(r"[\w.,]*->[\w.]*")


def scopes_in(stack: str) -> tuple[str, ...]:
    """The scopes in a stack of names, without the transformations around them.

    >>> scopes_in("transpose(jvp(model))/vmap(.layers[0])")
    ('model', '.layers[0]')
    """
    return tuple(
        name for name, opens in _TOKEN.findall(stack) if not opens and not _is_of_jax(name)
    )


def _is_of_jax(name: str) -> bool:
    return name in _OF_JAX or _INDICES.fullmatch(name) is not None


def is_backward(stack: str) -> bool:
    """Whether what was traced is on the way back of a reverse mode."""
    return "transpose(" in stack


def path_of(scopes: tuple[str, ...]) -> str:
    """The path of a layer; the parts of a path inside another follow it without a slash.

    >>> path_of(("model", ".layers[0]", "mask"))
    'model.layers[0]/mask'
    """
    path = ""
    for scope in scopes:
        path += scope if scope[0] in ".[" or not path else f"/{scope}"
    return path
