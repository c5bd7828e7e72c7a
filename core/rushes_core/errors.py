"""Every error that Rushes raises on purpose.

RushesError
├── CheckpointError             a checkpoint directory that must not be served
├── CheckpointUnreadable        a checkpoint directory whose file system failed: another try may find it good
├── SchemaMismatch              the database's schema is not one that this release works with
├── StorageError                the object store refused or lost something
│   ├── ObjectMissing           there is no such object, or no such bucket
│   ├── BucketMissing           there is no bucket that it could be in
│   └── StorageRefused          the store does not allow it
├── InvalidRequest              what a client sent is wrong; never retried, never counts against a worker
├── JobNotFound                 no such job in this project
├── JobDeleted                  there was one
├── TransitionRefused           the job is not in a state that allows the move
└── GenerationError             raised while a job runs, stored on the job
    ├── InvalidOutput           the clip that came out breaks its own contract
    │   └── NotFinite           the model computed infinities or no numbers
    ├── OutOfMemory             a rank's device had no memory left
    └── WorkerLost              the rank group ended under the job
"""


class RushesError(Exception):
    """Base of all errors that Rushes raises on purpose; the message is written for a user or an operator."""

    code = "internal_error"


class CheckpointError(RushesError):
    """A checkpoint directory that must not be served: names the file, the tensor or field, and what was expected."""

    code = "invalid_checkpoint"


class CheckpointUnreadable(RushesError):
    """The file system of a checkpoint failed: names the file and what the system said. Nothing is known of the
    checkpoint then, so this is no `CheckpointError`."""

    code = "checkpoint_unreadable"


def with_variable(error: Exception) -> str:
    """What is wrong with the settings, with the variable that says so: errors of the checkpoint name none, for commands
    take directories too."""
    is_of_checkpoint = isinstance(error, CheckpointError | CheckpointUnreadable)
    return f"RUSHES_CHECKPOINT: {error}" if is_of_checkpoint else str(error)


class SchemaMismatch(RushesError):
    """The database's schema is not one that this release works with: names the revision that it has and the one that is
    needed."""

    code = "schema_mismatch"


class StorageError(RushesError):
    """The object store could not be reached, refused an operation, or returned other bytes than were sent."""

    code = "storage_error"


class ObjectMissing(StorageError):
    """There is no object under this key, or no such bucket."""


class BucketMissing(StorageError):
    """There is no such bucket, where an object was asked for or a list of them."""


class StorageRefused(StorageError):
    """The object store answered that it does not allow the operation."""


class InvalidRequest(RushesError):
    """A value that a client sent is wrong: `param` is the field's path, the message names value and limit."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or type(self).code


class JobNotFound(RushesError):
    """No job with this id exists in the caller's project."""

    code = "video_not_found"


class JobDeleted(RushesError):
    """The job with this id was deleted: it is a tombstone."""

    code = "video_deleted"


class TransitionRefused(RushesError):
    """The job is not, or no longer, in a state that allows the move.

    Args:
        retry_after: seconds after which it may be; None where to wait does not help.
    """

    code = "invalid_state"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GenerationError(RushesError):
    """A job failed while it ran; `stage` says where."""

    code = "generation_failed"

    def __init__(self, message: str, *, stage: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class InvalidOutput(GenerationError):
    """The clip that came out breaks its own contract: wrong counts, no sound, or flaws that are refused."""

    code = "invalid_output"


class NotFinite(InvalidOutput):
    """Latents, frames or samples are infinite or no numbers."""

    code = "not_finite"


class OutOfMemory(GenerationError):
    """A rank's device had no memory left for the job."""

    code = "out_of_memory"


class WorkerLost(GenerationError):
    """The rank group ended under the job."""

    code = "worker_lost"
