"""Loops that are differentiable in every mode, with control over the memory of reverse mode."""

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
