"""The registry of the programs in this folder, and functions for several programs."""

from tests.beside_equinox import Programs

PROGRAMS = Programs()
program = PROGRAMS.add


def double(value: int) -> int:
    return 2 * value


def affine(scale: int, x: int, *, shift: int = 0) -> int:
    """Scales and shifts."""
    return scale * x + shift


def everything(*args, **kwargs):
    return args, kwargs


def tried(make, *arguments):
    """The field `x` of `make(*args)` for each `args`, or the name of the error."""
    outputs = []
    for args in arguments:
        try:
            outputs.append(make(*args).x)
        except (TypeError, AttributeError) as error:
            outputs.append(type(error).__name__)
    return outputs
