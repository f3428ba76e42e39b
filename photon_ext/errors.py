"""What runtime, engine and all above them raise on purpose. Each message names the value that was
wrong, what was expected and what to do.

User mistakes derive from ValueError too, so that `except ValueError` keeps working in code that
does not know this package. Ops and the native classes raise plain RuntimeError and ValueError, and
a step whose device or worker fails a plain RuntimeError.
"""

from __future__ import annotations

# Python refuses to write integers of more than 4300 digits, and nobody reads longer ones
_SHOWN_BITS = 256
_SHOWN_CHARACTERS = 200


class PhotonError(Exception):
    """Base of all errors raised by photon_ext."""


class ConfigError(PhotonError, ValueError):
    """A setting of the runtime, the engine or a sampling parameter is out of range or
    contradicts another.
    """


class RequestError(PhotonError, ValueError):
    """One request cannot be served as asked; all others are unaffected."""


class QueueFull(RequestError):
    """As many requests run and wait as the engine takes (`max_waiting`): try again later."""


class CompilerBusy(RequestError):
    """The form of an answer cannot be compiled now, or is not compiled yet: try again later."""


class ModelError(PhotonError, ValueError):
    """A model file is missing, damaged, foreign, or of an unsupported architecture."""


class DeviceError(PhotonError, RuntimeError):
    """A device that was asked for does not exist, or this build has no kernels for it.

    Failures of a running device are RuntimeError.
    """


class EngineDeadError(PhotonError, RuntimeError):
    """The engine was closed, or has crashed (the cause is chained), or runs in the process that
    this one is a fork of. Make a new one.
    """


class PipelineError(PhotonError, RuntimeError):
    """The pipeline was driven out of order, or a step's record does not belong to the lease that
    it was launched for.
    """


class NoFreeRow(PhotonError, RuntimeError):
    """Every row is in use: admission has to wait."""


class CaptureError(PhotonError, RuntimeError):
    """A step function cannot be recorded into a graph: on a CPU, it calls other ops than
    photon_ext's, views and empty tensors.
    """


def shown(value: object) -> str:
    """A value as a message names it: as in source code, where that is short; what is large or
    has no text, in a few words.
    """
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"{'a negative' if value < 0 else 'an'} integer of {value.bit_length()} bits"
    try:
        return shortened(repr(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # the caller's code
        return f"a {type(value).__name__} (whose text cannot be made)"


def shortened(text: str, most: int = _SHOWN_CHARACTERS) -> str:
    """A text as a message repeats it: whole up to `most` characters, else its begin and its end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def surrogate_in(text: str) -> str | None:
    """Names the first surrogate (a half of a UTF-16 pair) of `text` and its place: UTF-8 holds
    none, paired or not. None: it has none.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a surrogate, U+{ord(text[error.start]):04X}, at character {error.start}"
    return None


def describe(error: BaseException) -> str:
    """An exception in a few words, on one line.

    It may be anybody's: where its own text cannot be made, its type has to do.
    """
    try:
        return f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}"
    except BaseException:
        return f"{type(error).__name__} (whose text cannot be made)"
