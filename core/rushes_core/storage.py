"""Clips and uploaded files in an S3-compatible store: written once under keys of their own, verified, read by range."""

# botocore is not typed
# pyright: standard

import base64
import hashlib
import re
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache, cached_property
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO
from urllib.parse import quote

from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    IncompleteReadError,
    NoCredentialsError,
    ResponseStreamingError,
)
from botocore.loaders import Loader
from botocore.session import Session

from rushes_core.errors import BucketMissing, ObjectMissing, StorageError, StorageRefused
from rushes_core.settings import Settings
from rushes_core.variants import VIDEO

_BINARY = "application/octet-stream"
_KINDS: dict[str, type[StorageError]] = {
    **dict.fromkeys(("404", "NoSuchKey", "NotFound"), ObjectMissing),
    "NoSuchBucket": BucketMissing,
    **dict.fromkeys(("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), StorageRefused),
}
"""What is raised, by the code of the store's answer."""
_REDIRECTS = (301, 302, 307, 308)
_BROKEN = (ResponseStreamingError, IncompleteReadError)
_CHUNK_BYTES = 256 * 1024
_UNSAFE = re.compile(r"[^A-Za-z0-9._ -]+")
_REPEATED = re.compile(r"([-_ ])\1+")
_CONNECT_SECONDS = 3
"""How long a connection may take to be made."""
_READ_TIMEOUT_SECONDS = 20
"""How long the store may be silent in the middle of an answer, or of a body that it is sent."""
_LOOK_SECONDS = 1.0
_CHECK_SECONDS = 3
"""The same when it is only asked whether it is there."""
_MAX_SKEW = timedelta(minutes=10)
"""How far this machine's clock is at least from the store's when a refusal is put down to that: S3 bears 15 minutes."""
_CONNECTIONS = 32
"""Kept open between requests: as many as the API has threads for them."""

PART_BYTES = 5 * 1024 * 1024
"""The least that S3 takes as a part of an object, but for the last."""
_MAX_PARTS = 10_000

RESULTS = "results/"
"""Prefix of every result."""
FILES = "files/"
"""Prefix of every uploaded file."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What the store says of an object."""

    key: str
    num_bytes: int
    sha256: str
    """Hexadecimal; empty when the store keeps none."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An entry of the store's listing."""

    key: str
    num_bytes: int
    modified: datetime


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
        output = request.get("output") or {}
        return cls(output.get("bucket") or None, output.get("key_prefix") or "")

    def prefix(self, project: str, job_id: str) -> str:
        """Prefix of everything that this job's attempts stored."""
        return job_prefix(project, job_id, key_prefix=self.key_prefix)


def bucket_of_result(request: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Bucket of a completed job's clip; None: the deployment's usual one, whatever it was called then."""
    # the request may name a bucket and its worker, of the release before, not have known
    return None if Destination.of(request).bucket is None else result.get("bucket")


class ObjectStore:
    """One bucket. Clients of botocore may be used from several threads."""

    def __init__(self, settings: Settings) -> None:
        self.bucket = settings.s3_bucket
        self._settings = settings
        self._clients = _Clients(settings)

    def in_bucket(self, name: str | None) -> "ObjectStore":
        """The same store's bucket of this name; None: this one."""
        if name is None or name == self.bucket:
            return self
        other = copy(self)
        other.bucket = name
        return other

    @property
    def buckets(self) -> list["ObjectStore"]:
        """Every bucket that clips may be stored in, this one first."""
        return [self.in_bucket(name) for name in self._settings.output_buckets]

    @property
    def is_used(self) -> bool:
        """Whether the bucket is one that clips may be stored in."""
        return self.bucket in self._settings.output_buckets

    def check(self) -> None:
        """Ask whether the bucket answers. Takes seconds at the most.

        Raises:
            ObjectMissing: there is no such bucket.
            StorageRefused: it may not be used.
            StorageError: the store is away.
        """
        with _translated(f"bucket {self.bucket}"):
            self._clients.impatient.head_bucket(Bucket=self.bucket)

    def put_file(self, key: str, path: Path, *, content_type: str, sha256: str) -> StoredObject:
        """Store the file at `path` under `key`, which must not exist, and verify what the store holds.

        A reply that is lost or late is resolved by reading: the object that is there with this checksum is ours.

        Raises:
            StorageError: the store failed, or holds other bytes.
        """
        digest = base64.b64encode(bytes.fromhex(sha256)).decode()
        stored: StoredObject | None = None
        try:
            with path.open("rb") as file:
                self._clients.sending.put_object(
                    Bucket=self.bucket,
                    Key=key,
                    Body=file,
                    ContentType=content_type,
                    ChecksumSHA256=digest,
                    IfNoneMatch="*",
                )
        except (BotoCoreError, ClientError) as error:
            # why it cannot be looked at says less: an answer to HEAD has no words
            with suppress(StorageError):
                stored = self.head(key)
            if stored is None:
                raise StorageError(f"storing {key}: {_told(error)}") from error
        else:
            stored = self.head(key)
        num_bytes = path.stat().st_size
        if stored is not None and not stored.sha256 and stored.num_bytes == num_bytes:
            stored = self._read_again(stored)
        if stored is None or stored.num_bytes != num_bytes or stored.sha256 != sha256:
            raise StorageError(f"{key}: stored as {stored}, expected {num_bytes} bytes with SHA-256 {sha256}")
        return stored

    def begin(self, key: str, *, max_bytes: int) -> "Upload":
        """Begin to store an object of at most `max_bytes` piece by piece."""
        part_bytes = max(PART_BYTES, -(-max_bytes // _MAX_PARTS))
        return Upload(self._clients, self.bucket, key, folder=self._settings.scratch, part_bytes=part_bytes)

    def head(self, key: str) -> StoredObject | None:
        """What the store holds under `key`, or None."""
        try:
            with _translated(key):
                answer = self._client.head_object(Bucket=self.bucket, Key=key, ChecksumMode="ENABLED")
        except ObjectMissing:
            return None
        checksum = answer.get("ChecksumSHA256", "")
        return StoredObject(key, answer["ContentLength"], base64.b64decode(checksum).hex() if checksum else "")

    def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
        """Bytes `start` to `end` of an object, both included, in pieces.

        Raises:
            ObjectMissing: there is no such object.
            StorageError: before the first piece if the object cannot be opened, later if the connection breaks.
        """
        return self._pieces(key, self._open(key, start, end), start, end)

    def presigned_url(self, key: str, *, filename: str, content_type: str, seconds: int) -> str:
        """A URL that gives `key` to anybody for `seconds`, signed for the endpoint that clients reach.

        Raises:
            StorageError: there are no credentials to sign it with.
        """
        with _translated(key):
            url: str = self._clients.public.generate_presigned_url(
                "get_object",
                Params={
                    "Bucket": self.bucket,
                    "Key": key,
                    "ResponseContentType": content_type,
                    "ResponseContentDisposition": content_disposition(filename),
                },
                ExpiresIn=seconds,
            )
        return url

    def delete_prefix(self, prefix: str) -> int:
        """Remove every object below `prefix` and return how many there were.

        Raises:
            BucketMissing, StorageError
        """
        count = 0
        with _translated(f"{self.bucket}/{prefix}"):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
                keys = [item["Key"] for item in page.get("Contents", ())]
                self.delete_keys(keys)
                count += len(keys)
        return count

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove objects, at most 1,000 of them; one that is not there is removed."""
        if not keys:
            return
        with _translated(f"{self.bucket}/{keys[0]}"):
            answer = self._client.delete_objects(
                Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
        if errors := answer.get("Errors"):
            raise StorageError(f"deleting {errors[0].get('Key')}: {errors[0].get('Message')}")

    def list_pages(self, prefix: str) -> Iterator[list[StoredItem]]:
        """Everything below `prefix`, in pages of at most 1,000."""
        said = f"{self.bucket}/{prefix}"
        with _translated(said):
            pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix))
        while True:
            with _translated(said):
                page = next(pages, None)
            if page is None:
                return
            yield [StoredItem(item["Key"], item["Size"], item["LastModified"]) for item in page.get("Contents", ())]

    def abort_uploads(self, prefix: str, *, before: datetime) -> list[str]:
        """End the multipart uploads below `prefix` that began before that time and were not completed; their keys."""
        aborted: list[str] = []
        with _translated(f"{self.bucket}/{prefix}"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
                if upload["Initiated"] < before and self._abort(upload):
                    aborted.append(upload["Key"])
        return aborted

    def _read_again(self, stored: StoredObject) -> StoredObject:
        """`stored` with the SHA-256 of what the store gives, which says none itself."""
        digest = hashlib.sha256()
        for piece in self.read(stored.key, 0, stored.num_bytes - 1):
            digest.update(piece)
        return replace(stored, sha256=digest.hexdigest())

    def _open(self, key: str, start: int, end: int) -> Any:
        try:
            with _translated(key):
                answer = self._client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{end}")
        except BucketMissing as error:
            if self.is_used:
                raise
            # no bucket of this deployment any more, and removed with all that was in it
            raise ObjectMissing(str(error)) from error
        # a cache on the way may give the whole, and an object that was replaced have fewer bytes
        given = answer.get("ContentRange") or f"bytes 0-{answer.get('ContentLength', 0) - 1}/"
        if not given.startswith(f"bytes {start}-{end}/"):
            answer["Body"].close()
            raise StorageError(f"{key}: asked for bytes {start}-{end}, got {given}")
        return answer["Body"]

    def _pieces(self, key: str, body: Any, start: int, end: int) -> Iterator[bytes]:
        """What comes after a connection broke is asked for on another one, as long as each brings something."""
        while True:
            begun = start
            try:
                with _translated(key):
                    for piece in body.iter_chunks(_CHUNK_BYTES):
                        start += len(piece)
                        yield piece
                return
            except StorageError as error:
                if start == begun or not isinstance(error.__cause__, _BROKEN):
                    raise
            finally:
                body.close()
            if start > end:
                # all but the mark of its end came
                return
            body = self._open(key, start, end)

    def _abort(self, upload: dict[str, Any]) -> bool:
        try:
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except ClientError as error:
            # another sweeper was faster
            if _code(error) != "NoSuchUpload":
                raise
            return False
        return True

    @property
    def _client(self) -> Any:
        return self._clients.internal


class Upload:
    """An object on its way into the store: there is none before `complete`. For one thread at a time.

    What is not stored yet lies in a temporary file. A process that dies leaves parts in the store, which
    `ObjectStore.abort_uploads` finds.
    """

    def __init__(self, clients: "_Clients", bucket: str, key: str, *, folder: Path, part_bytes: int) -> None:
        self.key = key
        self.num_bytes = 0
        self._clients = clients
        self._object = {"Bucket": bucket, "Key": key}
        self._folder = folder
        self._part_bytes = part_bytes
        self._digest = hashlib.sha256()
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._stored_bytes = 0
        self._part: BinaryIO | None = None
        self._part_digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of everything that was written, hexadecimal."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        """Append `data`.

        Raises:
            StorageError: the store failed, or there is no room for the part.
        """
        left = memoryview(data)
        while left:
            # some stores take only parts of one size, but for the last
            piece = left[: self._stored_bytes + self._part_bytes - self.num_bytes]
            left = left[len(piece) :]
            self._spool(piece)
            self.num_bytes += len(piece)
            self._digest.update(piece)
            self._part_digest.update(piece)
            if self.num_bytes - self._stored_bytes == self._part_bytes:
                self._store_part()

    def complete(self) -> None:
        """Make one object of what was written, which must be a byte at least.

        Raises:
            StorageError: the store failed, or holds another number of bytes.
        """
        with _translated(self.key):
            if self._upload_id is None:
                self._clients.sending.put_object(**self._object, **self._body(), ContentType=_BINARY)
            else:
                if self.num_bytes > self._stored_bytes:
                    self._store_part()
                self._complete_parts()
            num_bytes = self._client.head_object(**self._object)["ContentLength"]
        if num_bytes != self.num_bytes:
            raise StorageError(f"{self.key}: stored as {num_bytes} bytes, expected {self.num_bytes}")

    def discard(self) -> None:
        """Leave nothing of it in the store, completed or not.

        Raises:
            StorageError
        """
        with _translated(self.key):
            if self._upload_id is not None:
                try:
                    self._client.abort_multipart_upload(**self._object, UploadId=self._upload_id)
                except ClientError as error:
                    if _code(error) != "NoSuchUpload":
                        raise
            self._client.delete_object(**self._object)

    def close(self) -> None:
        """Forget what is not stored."""
        if self._part is not None:
            # what a full disk did not take is tried again
            with suppress(OSError):
                self._part.close()

    @property
    def _client(self) -> Any:
        return self._clients.internal

    def _complete_parts(self) -> None:
        try:
            self._client.complete_multipart_upload(
                **self._object, UploadId=self._upload_id, MultipartUpload={"Parts": self._parts}
            )
        except ClientError as error:
            # so answer some stores when the reply to the first try was lost: the object is there, or it is not
            if _code(error) != "NoSuchUpload":
                raise

    def _spool(self, data: memoryview) -> None:
        try:
            if self._part is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._part = TemporaryFile(dir=self._folder)  # noqa: SIM115  for longer than this call
            self._part.write(data)
            # what waits in a buffer would be missed later
            self._part.flush()
        except OSError as error:
            raise StorageError(f"{self._folder} does not take a part of {self.key}: {error}") from error

    def _store_part(self) -> None:
        body, number = self._body(), len(self._parts) + 1
        with _translated(self.key):
            if self._upload_id is None:
                begun = self._client.create_multipart_upload(
                    **self._object, ContentType=_BINARY, ChecksumAlgorithm="SHA256"
                )
                self._upload_id = begun["UploadId"]
            stored = self._clients.sending.upload_part(
                **self._object, **body, UploadId=self._upload_id, PartNumber=number
            )
        self._parts.append({"PartNumber": number, "ETag": stored["ETag"], "ChecksumSHA256": body["ChecksumSHA256"]})
        self._stored_bytes = self.num_bytes
        self._part_digest = hashlib.sha256()
        body["Body"].seek(0)
        body["Body"].truncate()

    def _body(self) -> dict[str, Any]:
        assert self._part is not None
        self._part.seek(0)
        return {"Body": self._part, "ChecksumSHA256": base64.b64encode(self._part_digest.digest()).decode()}


class _Clients:
    """Made when they are first needed: that takes a moment. What is raised then is raised until it can be done."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looks_again_at = 0.0
        """When credentials that nobody had are looked for again: that may take seconds, which callers wait in turn."""

    @cached_property
    def internal(self) -> Any:
        return self._new_client(self._settings.s3_endpoint_url)

    @cached_property
    def sending(self) -> Any:
        """For what has a body: on a new connection that must not stall for longer than it may take to connect. One that
        does not come about then takes long, and is tried less often."""
        return self._new_client(
            self._settings.s3_endpoint_url,
            connect_timeout=_READ_TIMEOUT_SECONDS,
            retries={"mode": "standard", "total_max_attempts": 3},
        )

    @cached_property
    def public(self) -> Any:
        return self._new_client(self._settings.s3_public_endpoint_url or self._settings.s3_endpoint_url)

    @cached_property
    def impatient(self) -> Any:
        return self._new_client(
            self._settings.s3_endpoint_url, read_timeout=_CHECK_SECONDS, retries={"total_max_attempts": 1}
        )

    def _new_client(self, endpoint_url: str, **options: Any) -> Any:
        settings = self._settings
        style = settings.s3_addressing_style
        if style == "auto":
            # a dotted bucket name or a bare address cannot be a virtual host
            style = "path" if endpoint_url else "virtual"
        session = Session()
        session.register_component("data_loader", _loader())
        if not settings.s3_access_key_id:
            # the client would never look for them again, and what has them may only not be up yet
            if time.monotonic() < self._looks_again_at:
                raise NoCredentialsError
            if session.get_credentials() is None:
                self._looks_again_at = time.monotonic() + _LOOK_SECONDS
                raise NoCredentialsError
        client = session.create_client(
            "s3",
            region_name=settings.s3_region,
            endpoint_url=endpoint_url or None,
            aws_access_key_id=settings.s3_access_key_id or None,
            aws_secret_access_key=settings.s3_secret_access_key.get_secret_value() or None,
            config=Config(
                # presigned URLs for a custom endpoint would be signed with the old version otherwise
                signature_version="s3v4",
                tcp_keepalive=True,
                max_pool_connections=_CONNECTIONS,
                # everything is read by range, and some stores say the checksum of the whole then
                response_checksum_validation="when_required",
                s3={"addressing_style": style},
                **{
                    "connect_timeout": _CONNECT_SECONDS,
                    "read_timeout": _READ_TIMEOUT_SECONDS,
                    "retries": {"mode": "standard", "max_attempts": 4},
                    **options,
                },
            ),
        )
        client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        if endpoint_url:
            client.meta.events.register_first("needs-retry.s3", _refuse_redirect)
        return client


@cache
def _loader() -> Loader:
    """What reads descriptions of services for botocore, and keeps them: to read those of S3 is most of the time that it
    takes to make a client."""
    return Session().get_component("data_loader")


def _add_md5(params: dict[str, Any], **_: object) -> None:
    # botocore sends a newer checksum, and many a store refuses to delete without this one
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _refuse_redirect(response: Any, **_: object) -> None:
    # botocore takes it for a bucket of another region, and asks which until it may call no deeper
    if response is None:
        return
    answer, _ = response
    if answer.status_code in _REDIRECTS and "x-amz-bucket-region" not in answer.headers:
        where = answer.headers.get("location", "nowhere")
        raise StorageError(f"the store's endpoint answers {answer.status_code} and leads to {where}")


def content_disposition(filename: str, *, kind: str = "inline") -> str:
    """A Content-Disposition value that is safe for any `filename` (RFC 6266).

    What has no ASCII is left out of the name that old clients take.
    """
    folded = unicodedata.normalize("NFKD", filename).encode("ascii", "ignore").decode()
    ascii_name = _REPEATED.sub(r"\1", _UNSAFE.sub("_", folded)).lstrip("-. ") or "file"
    return f"{kind}; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(filename, safe='')}"


class _translated:
    """Turns the client library's exceptions into `StorageError`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (BotoCoreError, ClientError)):
            told_as = StorageError if _seconds_ahead(error) else _KINDS.get(_code(error), StorageError)
            raise told_as(f"{self._what}: {_told(error)}") from error


def _code(error: BaseException | None) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _told(error: Exception) -> str:
    ahead = _seconds_ahead(error)
    return f"{error}; this machine's clock is {ahead:+d} seconds from that of the store" if ahead else str(error)


def _seconds_ahead(error: Exception) -> int:
    """How far this machine's clock is from that of the store, if that is why it refused."""
    response = error.response["ResponseMetadata"] if isinstance(error, ClientError) else {}
    date = response.get("HTTPHeaders", {}).get("date", "")
    if response.get("HTTPStatusCode") != HTTPStatus.FORBIDDEN or not date:
        return 0
    try:
        ahead = datetime.now(UTC) - parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return 0
    return round(ahead.total_seconds()) if abs(ahead) > _MAX_SKEW else 0
