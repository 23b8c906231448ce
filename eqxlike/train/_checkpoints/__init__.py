"""Checkpoints: atomic files of a state, written and read by Orbax.

In reading order:

- `_manifest`: the description and the checksums of a checkpoint.
- `_orbax`: writing and reading with Orbax, also in the background.
- `_folder`: saving and restoring a state, and the folder with the checkpoints of a run.
"""

from ._folder import CheckpointFolder as CheckpointFolder
from ._folder import Restored as Restored
from ._folder import place_like as place_like
from ._folder import restore as restore
from ._folder import save as save
from ._manifest import CheckpointError as CheckpointError
from ._orbax import Saving as Saving
