"""What can go wrong between raw frames and a stored clip.

MediaError                  the clip could not be made; the job's stage is `media`
├── MediaProcessLost        the media process died or hung; the clip it worked on is gone
└── InvalidClip             a file that is not the clip it should be (also an `InvalidOutput`)
"""

from rushes_core.errors import GenerationError, InvalidOutput


class MediaError(GenerationError):
    """A clip could not be encoded: refused frames or sound, a full disk, an encoder that failed.

    `kind` is the class name of the error as it was raised, here or in the media process.
    """

    code = "media_failed"

    def __init__(self, message: str, *, kind: str | None = None) -> None:
        super().__init__(message, stage="media")
        self.kind = kind or type(self).__name__


class MediaProcessLost(MediaError):
    """The media process died or did not answer in time."""

    code = "media_process_lost"


class InvalidClip(MediaError, InvalidOutput):
    """A file that is not the clip it should be; the message names what differs, and both values."""

    code = "invalid_output"


def require(condition: bool, message: str) -> None:
    """
    Raises:
        InvalidClip: `condition` does not hold.
    """
    if not condition:
        raise InvalidClip(message)


def require_equal(what: str, value: object, expected: object) -> None:
    """
    Raises:
        InvalidClip: `value` is not `expected`.
    """
    require(value == expected, f"the {what} must be {expected}, got {value}")
