"""Loops on lists of arrays, and their derivatives.

Read the files in this order:

- `_counted_scan`: the differentiable scan. The top of the file explains the method.
- `_scan`: the data types: a scan (`Scan`), its inputs (`Operands`), and its segments.
- `_step`: the forward pass of a scan, the backward pass of one step, the cotangents of buffers.
- `_tangents`: finds the arrays that have tangents, and builds the scan that propagates them.
- `_counted_while`: a loop of unknown length, differentiated as a scan of the steps that the loop
  ran.
- `_revolve`: reverse mode with few saved carries.
- `_transposes`: the transpose of a loop of unknown length, for `jax.linear_transpose`.
- `_batched`: primitives with which a batch of loops stays one loop under `jax.vmap`.

Basic terms:

- **consts**: the arrays that all steps share.
- **carry**: the arrays that are passed from step to step. `Operands.carry` is the initial carry. A
  returned carry, or a carry named `last`, is the last carry.
- **xs**: the arrays whose rows are the inputs of the steps. One row is **x**.
- **ys**: the arrays whose rows are the outputs of the steps. One row is **y**.
- **saved**: the part of a carry that reverse mode saves. It has all arrays except buffers.

Terms for derivatives, batches and buffers:

- **nonzero**: an array whose tangent is not known to be zero.
- **active**: a member of a batch is active until its loop has ended.
- **masked**: an array of the carry that the step itself leaves unchanged for members that are not
  active. For all other arrays, the scan selects the old or the new value after the step.
- **written once**: an array of the carry that is a buffer. Each entry is written at most once, and
  read only afterwards.
- **reading**: the scan without its writes to buffers. Reverse mode uses this scan to run steps
  again after the loop has filled the buffers.
- **shared**: a const is shared if it is the same for all members of a batch. Its cotangents are
  summed over the batch.
"""
