"""Every error a user can meet, as one tree.

    PacelineError
    ├─ ConfigError (ValueError)          value, allowed range, where it came from
    ├─ CheckpointError
    │   ├─ UnknownFormatError            what was found, which formats exist
    │   └─ LossyConversionError          the exact tensors or fields that would be lost
    ├─ IncompatiblePairError             drafter and target do not belong together
    ├─ UnsupportedTargetError            an architecture or cache that cannot be verified or rolled back
    ├─ DownloadError                     a model could not be fetched or did not match its digest
    ├─ RequestError                      a request that cannot be honoured (HTTP 400)
    └─ CapacityError                     no room now (HTTP 429/503)

A message says what was expected, what was got, and what to do.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """A value outside its allowed range, or a field that does not exist."""


class CheckpointError(PacelineError):
    """Files of a model that are missing, truncated or not what their config says."""


class UnknownFormatError(CheckpointError):
    """A folder that no known checkpoint format describes."""


class LossyConversionError(CheckpointError):
    """A conversion that would drop tensors or fields."""


class IncompatiblePairError(PacelineError):
    """A drafter that was not made for this target."""


class UnsupportedTargetError(PacelineError):
    """A target whose architecture or cache cannot be verified in blocks or rolled back."""


class DownloadError(PacelineError):
    """A model that could not be fetched, or that did not match its digest."""


class RequestError(PacelineError, ValueError):
    """A request that cannot be honoured; names the parameter and the reason."""


class CapacityError(PacelineError):
    """A request that does not fit now, or can never fit."""
