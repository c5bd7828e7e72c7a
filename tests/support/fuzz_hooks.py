"""What Schemathesis does to the requests that it makes up: ids of the right form become those of jobs that exist."""

import json
import os
import random
import re
from typing import Any

import schemathesis

IDS = "FUZZ_IDS"
_FILE_ID = re.compile("file_[0-7][0-9A-HJKMNP-TV-Z]{25}", re.ASCII)
_BATCH_ID = re.compile("batch_[0-7][0-9A-HJKMNP-TV-Z]{25}", re.ASCII)
_VIDEO_ID = re.compile("video_[0-7][0-9A-HJKMNP-TV-Z]{25}", re.ASCII)


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Another path for the same operation. Most made-up ids are nobody's, and events of a job that waits never end."""
    for name, form in (("file_id", _FILE_ID), ("batch_id", _BATCH_ID)):
        found = (path_parameters or {}).get(name)
        if path_parameters is not None and isinstance(found, str) and form.fullmatch(found):
            known: list[str] = json.loads(os.environ[IDS])[name]
            return path_parameters | {name: random.Random(found).choice([*known, found])}
    found = (path_parameters or {}).get("video_id")
    if path_parameters is None or not isinstance(found, str) or not _VIDEO_ID.fullmatch(found):
        return path_parameters
    ids: dict[str, list[str]] = json.loads(os.environ[IDS])
    is_endless = context.operation.path.endswith("/events")
    # the same made-up id always becomes the same job: a run can be repeated
    choice = random.Random(found).choice(ids["ended"] if is_endless else [*ids["video_id"], found])
    return path_parameters | {"video_id": choice}
