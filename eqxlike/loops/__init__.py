"""Loops that are differentiable in every mode, with control over the memory of reverse mode.

The files, in the order in which to read them:

- `_loops`: the public functions `while_loop`, `fori_loop` and `scan`.
- `_body`: traces the user's functions, and makes functions of lists of arrays from them.
- `_scan`: the data types of loops over lists of arrays. The top of the file explains the terms.
- `_counted`: the differentiable loops. The top of the file explains reverse mode.
- `_step`: the forward pass of a scan, the backward pass of one step, and `revolve`, the backward
  pass with few `checkpoints`.
- `_primitives`: loops that stay one loop under `jax.vmap`, and their transposes.
- `_buffers`: arrays in which each entry is written at most once.
- `_progress`: displays the progress of loops.
"""

from ._buffers import Buffer as Buffer
from ._buffers import MaybeBuffer as MaybeBuffer
from ._buffers import buffer_at_set as buffer_at_set
from ._loops import fori_loop as fori_loop
from ._loops import scan as scan
from ._loops import while_loop as while_loop
from ._primitives import unvmap_all as unvmap_all
from ._primitives import unvmap_any as unvmap_any
from ._primitives import unvmap_max as unvmap_max
from ._progress import ProgressBar as ProgressBar
from ._progress import progress as progress
