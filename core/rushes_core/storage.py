"""A bucket of an S3-compatible store: objects are written once under keys of their own, verified, and read by range."""

# botocore is not typed
# pyright: standard

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, IncompleteReadError, ResponseStreamingError

from rushes_core.content_disposition import content_disposition
from rushes_core.errors import BucketMissing, ObjectMissing, StorageError
from rushes_core.settings import Settings
from rushes_core.store_clients import StoreClients
from rushes_core.store_faults import code_of, told, translated
from rushes_core.store_upload import PART_BYTES, Upload

_BROKEN = (ResponseStreamingError, IncompleteReadError)
_CHUNK_BYTES = 256 * 1024
_MAX_PARTS = 10_000


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


class ObjectStore:
    """One bucket. Clients of botocore may be used from several threads."""

    def __init__(self, settings: Settings) -> None:
        self.bucket = settings.s3_bucket
        self._settings = settings
        self._clients = StoreClients(settings)

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
        with translated(f"bucket {self.bucket}"):
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
                raise StorageError(f"storing {key}: {told(error)}") from error
        else:
            stored = self.head(key)
        num_bytes = path.stat().st_size
        if stored is not None and not stored.sha256 and stored.num_bytes == num_bytes:
            stored = self._read_again(stored)
        if stored is None or stored.num_bytes != num_bytes or stored.sha256 != sha256:
            raise StorageError(f"{key}: stored as {stored}, expected {num_bytes} bytes with SHA-256 {sha256}")
        return stored

    def begin(self, key: str, *, max_bytes: int) -> Upload:
        """Begin to store an object of at most `max_bytes` piece by piece."""
        part_bytes = max(PART_BYTES, -(-max_bytes // _MAX_PARTS))
        return Upload(self._clients, self.bucket, key, folder=self._settings.scratch, part_bytes=part_bytes)

    def head(self, key: str) -> StoredObject | None:
        """What the store holds under `key`, or None."""
        try:
            with translated(key):
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
        with translated(key):
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
        with translated(f"{self.bucket}/{prefix}"):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
                keys = [item["Key"] for item in page.get("Contents", ())]
                self.delete_keys(keys)
                count += len(keys)
        return count

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove objects, at most 1,000 of them; one that is not there is removed."""
        if not keys:
            return
        with translated(f"{self.bucket}/{keys[0]}"):
            answer = self._client.delete_objects(
                Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
        if errors := answer.get("Errors"):
            raise StorageError(f"deleting {errors[0].get('Key')}: {errors[0].get('Message')}")

    def list_pages(self, prefix: str) -> Iterator[list[StoredItem]]:
        """Everything below `prefix`, in pages of at most 1,000."""
        said = f"{self.bucket}/{prefix}"
        with translated(said):
            pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix))
        while True:
            with translated(said):
                page = next(pages, None)
            if page is None:
                return
            yield [StoredItem(item["Key"], item["Size"], item["LastModified"]) for item in page.get("Contents", ())]

    def abort_uploads(self, prefix: str, *, before: datetime) -> list[str]:
        """End the multipart uploads below `prefix` that began before that time and were not completed; their keys."""
        aborted: list[str] = []
        with translated(f"{self.bucket}/{prefix}"):
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
            with translated(key):
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
                with translated(key):
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
            if code_of(error) != "NoSuchUpload":
                raise
            return False
        return True

    @property
    def _client(self) -> Any:
        return self._clients.internal
