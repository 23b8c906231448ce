"""Checkpoints: a state in files, whole or not at all. Orbax writes and reads them.

In the order of reading:

- `_manifest`: what is in the folder of a checkpoint, and whether it is damaged.
- `_orbax`: the manager of a folder, a save that is under way, and the arrays.
- `_folder`: saving and restoring a state, and the checkpoints of a run.
"""

from ._folder import CheckpointFolder as CheckpointFolder
from ._folder import Restored as Restored
from ._folder import place_like as place_like
from ._folder import restore as restore
from ._folder import save as save
from ._manifest import CheckpointError as CheckpointError
from ._orbax import Saving as Saving
