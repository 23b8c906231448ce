"""Where the time of a run goes."""

from ._functions import FunctionTimes as FunctionTimes
from ._functions import Split as Split
from ._functions import split as split
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._samples import JAX as JAX
from ._samples import OTHER as OTHER
from ._samples import OURS as OURS
from ._samples import Frame as Frame
from ._samples import hot_frames as hot_frames
from ._samples import innermost as innermost
from ._samples import new_profiler as new_profiler
from ._samples import render_text as render_text
from ._samples import sample as sample
from ._samples import self_times as self_times
from ._samples import shares as shares
from ._samples import write as write
