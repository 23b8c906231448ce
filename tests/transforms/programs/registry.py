"""The programs with transformations, which the files of this folder add."""

from tests.beside_equinox import Programs

PROGRAMS = Programs()
program = PROGRAMS.add
