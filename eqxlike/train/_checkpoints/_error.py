"""What is raised for a checkpoint that is damaged."""


class CheckpointError(ValueError):
    """A checkpoint is damaged: files are missing, cut off, changed, or no checkpoint at all.

    An older checkpoint may be whole, so it is worth a try. For one that is whole, but of another
    model than is asked for, a `ValueError` that is no `CheckpointError` is raised: there older ones
    help no more.
    """
