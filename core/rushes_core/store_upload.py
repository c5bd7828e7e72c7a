"""An object that is stored piece by piece, while it comes."""

# botocore is not typed
# pyright: standard

import base64
import hashlib
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from botocore.exceptions import ClientError

from rushes_core.errors import StorageError
from rushes_core.store_clients import StoreClients
from rushes_core.store_faults import code_of, translated

PART_BYTES = 5 * 1024 * 1024
"""The least that S3 takes as a part of an object, but for the last."""
_BINARY = "application/octet-stream"


class Upload:
    """An object on its way into the store: there is none before `complete`. For one thread at a time.

    What is not stored yet lies in a temporary file. A process that dies leaves parts in the store, which
    `ObjectStore.abort_uploads` finds.
    """

    def __init__(self, clients: StoreClients, bucket: str, key: str, *, folder: Path, part_bytes: int) -> None:
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
        with translated(self.key):
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
        with translated(self.key):
            if self._upload_id is not None:
                try:
                    self._client.abort_multipart_upload(**self._object, UploadId=self._upload_id)
                except ClientError as error:
                    if code_of(error) != "NoSuchUpload":
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
            if code_of(error) != "NoSuchUpload":
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
        with translated(self.key):
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
