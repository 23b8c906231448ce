"""The programs with Modules, which the files of this folder add, and what several of them take."""

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
    """What `make` gives for each of the arguments, or the name of what it raises."""
    outputs = []
    for args in arguments:
        try:
            outputs.append(make(*args).x)
        except (TypeError, AttributeError) as error:
            outputs.append(type(error).__name__)
    return outputs
