"""Modules: frozen dataclasses that are pytrees.

The files, in the order in which to read them. First, how a class and its instances are made:

- `_module`: `Module`, its metaclass, and its bound methods.
- `_fields`: `field`; frozen fields and the cached partition of an instance; the generated code that
  sets, flattens and unflattens fields.
- `_class`: the record that the metaclass keeps for each class, how a class is pickled by value,
  abstract attributes, and the rules of classes with `strict=True`.

Then parts that a first reading can skip:

- `_wrapper`: `Partial`, and Modules that show the name and documentation of the callable that they
  wrap.
- `_naming`: the names of layers in a traced program.
- `_derived`: generated subclasses for frozen arrays, and for Modules that report their calls.
"""

from ._class import AbstractClassVar as AbstractClassVar
from ._class import AbstractVar as AbstractVar
from ._class import StrictConfig as StrictConfig
from ._class import Traits as Traits
from ._class import abstract_names as abstract_names
from ._class import ignore_strict_rules as ignore_strict_rules
from ._class import own_record as own_record
from ._derived import freeze_where as freeze_where
from ._derived import observe_calls as observe_calls
from ._fields import METADATA_KEY as METADATA_KEY
from ._fields import CachedPartition as CachedPartition
from ._fields import Initialising as Initialising
from ._fields import LazyPartition as LazyPartition
from ._fields import can_stay_lazy as can_stay_lazy
from ._fields import carries_metadata as carries_metadata
from ._fields import clear_slot as clear_slot
from ._fields import field as field
from ._fields import get_cached as get_cached
from ._fields import is_incomplete as is_incomplete
from ._fields import set_cached as set_cached
from ._fields import static_field as static_field
from ._fields import stored_fields as stored_fields
from ._module import METADATA as METADATA
from ._module import BoundMethod as BoundMethod
from ._module import Module as Module
from ._module import ModuleMeta as ModuleMeta
from ._module import Wrapper as Wrapper
from ._module import bind as bind
from ._naming import LayerCall as LayerCall
from ._naming import name_again as name_again
from ._naming import names_in as names_in
from ._naming import naming_layers as naming_layers
from ._wrapper import Partial as Partial
from ._wrapper import module_update_wrapper as module_update_wrapper
from ._wrapper import shown_by as shown_by
