"""Pictures of predictions, of how far to believe them, and of how well chains have mixed.

Each draws in the axes of matplotlib that it is given, or in those of a new figure, and returns
them. A new figure is none of pyplot's: `axes.figure.savefig("file.png")` writes it, and a notebook
shows `axes.figure`.
"""

from ._bands import bands as bands
from ._coverage import coverage as coverage
from ._ranks import ranks as ranks
from ._ranks import sbc_ranks as sbc_ranks
from ._reliability import reliability as reliability
from ._traces import traces as traces
