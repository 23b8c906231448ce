"""Checkpoints: a state in files, whole or not at all.

In the order of reading:

- `_save`, `_restore`: the two functions.
- `_format`: what is in the folder.
- `_folder`: the newest, the best.
- `_background`: who writes when.
"""

from ._background import Saving as Saving
from ._folder import CheckpointFolder as CheckpointFolder
from ._format import CheckpointError as CheckpointError
from ._restore import Restored as Restored
from ._restore import place_like as place_like
from ._restore import restore as restore
from ._save import save as save
