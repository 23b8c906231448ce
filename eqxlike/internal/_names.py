"""Names that differ from those of the same things elsewhere."""

from ..debug import _announce, backward_nan
from ..loops._flat import _batched

debug_backward_nan = backward_nan
announce_jaxpr_p = _announce._announce_p
select_if_vmap_p = _batched._select
unvmap_all_p = _batched._all
unvmap_any_p = _batched._any
unvmap_max_p = _batched._max
