"""Loops of lists of arrays, and their derivatives.

In the order of reading:

- `_scan`: what a scan is (`Scan`), what it is run on (`Operands`), and its segments.
- `_step`: the scan as it runs; one of its steps backwards; the cotangents of its buffers.
- `_tangents`: which arrays have tangents, and the scan of these.
- `_counted_scan`, `_counted_while`: the differentiable loops.
- `_revolve`: their reverse mode with few saved carries.
- `_batched`: what keeps them one loop under `jax.vmap`.

The words:

- **consts**, **carry**, **xs**: the arrays that all steps share; those that go from step to step;
  those whose rows the steps get, one each. A step returns the next carry and **y**, a row of
  **ys**. In operands the carry is that at the start; one that was returned, or is named `last`, is
  that at the end.
- **nonzero**: has a tangent that is not known to be zero.
- **active**: of a member of a batch, has not ended. **masked**: of an array of the carry, is left
  as it was by the step itself where that is not active; of the others the scan selects.
- **written once**: of a buffer in the carry: each place is written once, and read afterwards.
- **saved**: all of a carry for the reverse mode that is not written once.
- **reading**: the scan as it runs again on written buffers; it writes to none.
- **shared**: of a const, is the same for all members of a batch: cotangents are summed over it.
"""
