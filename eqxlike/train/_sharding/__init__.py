"""Where the arrays of a training lie: on which devices, and in which parts."""

from ..._collectives import Collective as Collective
from ..._collectives import collectives as collectives
from ._inside import evaluate_sharded as evaluate_sharded
from ._inside import measure_sharded as measure_sharded
from ._plan import Exchange as Exchange
from ._plan import Memory as Memory
from ._plan import Plan as Plan
from ._plan import plan as plan
from ._ready_made import data_parallel as data_parallel
from ._ready_made import fsdp as fsdp
from ._shard import check_sharding as check_sharding
from ._shard import place_batch as place_batch
from ._shard import shard as shard
from ._sharding import Sharding as Sharding
