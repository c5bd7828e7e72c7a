"""Where objects lie in the store: the bucket and the key of every result and of every uploaded file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rushes_core.variants import VIDEO

RESULTS = "results/"
"""Prefix of every result."""
FILES = "files/"
"""Prefix of every uploaded file."""


def result_key(
    project: str, job_id: str, attempt: int, fence: int, name: str = VIDEO.filename, *, key_prefix: str = ""
) -> str:
    """Key of an attempt's result. The fence makes it unique: two attempts can never write the same object."""
    return f"{job_prefix(project, job_id, key_prefix=key_prefix)}{attempt}-{fence}/{name}"


def file_key(project: str, file_id: str) -> str:
    """Key of an uploaded file."""
    return f"{FILES}{project}/{file_id}"


def job_prefix(project: str, job_id: str, *, key_prefix: str = "") -> str:
    """Prefix of everything that a job's attempts stored.

    Args:
        key_prefix: what the client wants its keys to have before the job's id.
    """
    return "/".join([f"{RESULTS}{project}", *filter(None, key_prefix.split("/")), job_id, ""])


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a job's objects go, as its request has it."""

    bucket: str | None
    """None: the deployment's usual one."""
    key_prefix: str

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> "Destination":
        """That of a job with this `request`, as its row keeps it."""
        output: Mapping[str, Any] = request.get("output") or {}
        return cls(output.get("bucket") or None, output.get("key_prefix") or "")

    def prefix(self, project: str, job_id: str) -> str:
        """Prefix of everything that this job's attempts stored."""
        return job_prefix(project, job_id, key_prefix=self.key_prefix)


def bucket_of_result(request: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Bucket of a completed job's clip; None: the deployment's usual one, whatever it was called then."""
    # the request may name a bucket and its worker, of the release before, not have known
    return None if Destination.of(request).bucket is None else result.get("bucket")
