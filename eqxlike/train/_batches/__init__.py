"""Batches: shuffled ones, and those that a thread makes ahead."""

from ._minibatches import Minibatches as Minibatches
from ._minibatches import minibatches as minibatches
from ._prefetch import Prefetch as Prefetch
from ._prefetch import prefetch as prefetch
