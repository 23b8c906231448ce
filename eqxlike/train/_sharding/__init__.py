"""Sharding: how the arrays of a model and its batches are split over devices."""

from ._sharding import Sharding as Sharding
from ._sharding import check_sharding as check_sharding
from ._sharding import data_parallel as data_parallel
from ._sharding import evaluate_sharded as evaluate_sharded
from ._sharding import fsdp as fsdp
from ._sharding import measure_sharded as measure_sharded
from ._sharding import place_batch as place_batch
from ._sharding import shard as shard
