"""The errors a user can cause, each phrased for the person at the keyboard."""


class ClusterprofError(Exception):
    """Base of every error this package raises on purpose; its text is one sentence to show as it is."""


class ModelError(ClusterprofError):
    """A model cannot be loaded, or cannot be used the way it was asked to."""


class DataError(ClusterprofError):
    """A dataset cannot be found or read, or a row of it is not what its format promises."""


class ProfileError(ClusterprofError):
    """A profile file is not valid, or does not belong to the model it is used with."""


class CompressionError(ClusterprofError):
    """A cache cannot be compressed in the way it was asked to."""


class UnsupportedModelError(CompressionError):
    """A model's attention cannot be compressed at all, whatever the prompt."""


def spares_the_run(error: Exception) -> bool:
    """Whether an error costs one sample or one trial, not the whole run: bad numbers, or too little memory."""
    # torch raises OutOfMemoryError, a RuntimeError, on an accelerator, and a plain RuntimeError on the CPU.
    out_of_memory = isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    )
    if isinstance(error, UnsupportedModelError):
        return False
    return isinstance(error, CompressionError | MemoryError) or out_of_memory
