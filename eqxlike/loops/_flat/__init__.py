"""Loops of lists of arrays, and their derivatives.

In the order of reading:

- `_counted_scan`: the idea, at the top of its file; the differentiable scan.
- `_scan`: the vocabulary: a scan (`Scan`), what it is run on (`Operands`), and its segments.
- `_step`: the scan as it runs; one of its steps backwards; the cotangents of its buffers.
- `_tangents`: which arrays have tangents, and the scan of these.
- `_counted_while`: a loop of unknown length, differentiated as such a scan.
- `_revolve`: reverse mode with few saved carries.
- `_transposes`: the transpose that `jax.linear_transpose` uses for a loop of unknown length.
- `_batched`: what keeps each of them one loop under `jax.vmap`.

The words needed at once:

- **consts**: the arrays that all steps share.
- **carry**: the arrays that go from step to step. In operands it is the carry at the start. A
  returned carry, or one named `last`, is that at the end.
- **xs**: the arrays of which each step gets a row, **x**.
- **ys**: the arrays whose rows the steps return, one **y** each.
- **saved**: the part of a carry that is kept for reverse mode: all that is not written once.

For derivatives, batches and buffers:

- **nonzero**: has a tangent that is not known to be zero.
- **active**: a member of a batch is active until it has ended.
- **masked**: the step itself leaves this array unchanged where it is not active. For other arrays
  the scan selects old or new.
- **written once**: each place of this array, a buffer, is written once, and read only after that.
- **reading**: the scan as it runs again on written buffers; it writes to none.
- **shared**: a const is shared if all members of a batch have the same. Its cotangents are summed
  over the batch.
"""
