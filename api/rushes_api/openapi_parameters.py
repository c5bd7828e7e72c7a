"""Parameters in the OpenAPI document: what each in a path or a query is about, and what it may be."""

from typing import Any

from rushes_core.campaigns.statements import PARTS
from rushes_core.campaigns.tables import STATES
from rushes_core.files import ALL_PURPOSES

from rushes_api.campaign_options import MAPS, OPTIONS
from rushes_api.errors import MINIMAX_PREFIX
from rushes_api.minimax_task import DEFAULT_PAGE_SIZE, MAX_PAGE_NUMBER, MAX_PAGE_SIZE, TASK_TYPES
from rushes_api.minimax_task import STATES as TASK_STATES

Object = dict[str, Any]

_ULID = "[0-7][0-9A-HJKMNP-TV-Z]{25}"
VIDEO_ID = f"^video_{_ULID}$"
FILE_ID = f"^file_{_ULID}$"
KEY_ID = f"^key_{_ULID}$"
BATCH_ID = f"^batch_{_ULID}$"
ENDPOINT_ID = f"^whe_{_ULID}$"
DELIVERY_ID = "^whd_[0-9a-f]{32}$"
WORKER_ID = "^[A-Za-z0-9._-]{1,200}~[0-9]{1,10}-[0-9a-f]{1,16}$"
PROJECT = "^[a-z0-9][a-z0-9-]{0,62}$"


REQUEST_ID: Object = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Id of this request, chosen by the client; what is no such token is replaced",
    "schema": {"type": "string"},
}

_TIME: Object = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number", "minimum": 0}]}
_QUERY: dict[str, Object] = {
    "after": {"description": "Id of the last one of the page before"},
    "limit": {
        "description": "How many at most",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    },
    "order": {"description": "By creation, the newest or the oldest first", "schema": {"enum": ["asc", "desc"]}},
    "status": {
        "description": "Only those with one of these statuses",
        "style": "form",
        "explode": False,
        "schema": {
            "type": "array",
            "minItems": 1,
            "items": {"enum": ["queued", "in_progress", "completed", "failed", "cancelled", "expired"]},
        },
    },
    "model": {"description": "Only those of this model", "schema": {"type": "string"}},
    "created_after": {"description": "Only those that were created in a later second", "schema": _TIME},
    "created_before": {"description": "Only those that were created in an earlier second", "schema": _TIME},
    "metadata[]": {
        "name": "metadata",
        "description": "Only those whose metadata has all of these pairs: `metadata[key]=value`",
        "style": "deepObject",
        "explode": True,
        "schema": {
            "type": "object",
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
    },
    "campaign_id": {
        "description": "Only those of this campaign",
        "schema": {"type": "string", "pattern": BATCH_ID},
    },
    "custom_id": {
        "description": "Only those with this `custom_id`",
        "schema": {"type": "string", "minLength": 1, "maxLength": 256},
    },
    "compat": {
        "description": "`openai`: show `cancelled` and `expired` as `failed`, with the same `error.code`",
        "schema": {"enum": ["openai"]},
    },
    "variant": {
        "description": "What to fetch",
        "schema": {"enum": ["video", "thumbnail", "spritesheet", "audio"], "default": "video"},
    },
    "redirect": {
        "description": "`false`: the URL and its end as JSON instead of a redirect",
        "schema": {"enum": ["true", "false"]},
    },
    "project": {"description": "Only those of this project", "schema": {"type": "string", "pattern": PROJECT}},
}
_QUERY_OF_DELIVERIES: dict[str, Object] = {
    "video_id": {
        "description": "Only those that tell of this video",
        "schema": {"type": "string", "pattern": VIDEO_ID},
    },
    "batch_id": {
        "description": "Only those that tell of this batch itself, not of its videos",
        "schema": {"type": "string", "pattern": f"^batch_{_ULID}$"},
    },
    "webhook_endpoint_id": {
        "description": "Only those to this endpoint",
        "schema": {"type": "string", "pattern": ENDPOINT_ID},
    },
    "status": {
        "description": "Only those with this status",
        "schema": {"enum": ["pending", "delivering", "delivered", "failed", "cancelled"]},
    },
}
_QUERY_OF_FILES: dict[str, Object] = {
    "purpose": {"description": "Only those for this purpose", "schema": {"enum": list(ALL_PURPOSES)}},
}
_DRY_RUN: Object = {
    "description": "Say what would be, and do nothing; of a list: only dry runs, which it has not otherwise",
    "schema": {"enum": ["0", "1", "true", "false"]},
}
_QUERY_OF_OPTIONS: dict[str, Object] = {
    **{
        name: {"description": f"As `{name}` in a body of JSON", "schema": {"type": "string"}}
        for name in OPTIONS
        if name not in MAPS
    },
    **{
        f"{name}[]": {
            "name": name,
            "description": f"As `{name}` in a body of JSON: `{name}[key]=value`",
            "style": "deepObject",
            "explode": True,
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        }
        for name in MAPS
    },
}
_QUERY_OF_CAMPAIGNS: dict[str, Object] = {
    "status": {
        "description": "Only those with one of these statuses",
        "style": "form",
        "explode": False,
        "schema": {"type": "array", "minItems": 1, "items": {"enum": list(STATES)}},
    },
    "dry_run": _DRY_RUN,
    "validate": {
        "description": "`strict`: one bad line fails the whole campaign",
        "schema": {"enum": ["lines", "strict"]},
    },
    "format": {
        "description": "Lines of JSON, or a table",
        "schema": {"enum": ["jsonl", "csv"], "default": "jsonl"},
    },
    "part": {
        "description": "Items that completed, those that ended without a clip, or all",
        "schema": {"enum": list(PARTS), "default": "all"},
    },
}
_QUERY_OF_QUEUE: dict[str, Object] = {
    "project": {
        "description": "Another project than the key's own, or `*` for all; needs the scope `admin`",
        "schema": {"type": "string", "pattern": rf"^\*$|{PROJECT}"},
    }
}
_QUERY_OF_TASKS: dict[str, Object] = {
    "page_num": {
        "description": "Which page",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_NUMBER, "default": 1},
    },
    "page_size": {
        "description": "How many at most",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": DEFAULT_PAGE_SIZE},
    },
    "filter.status": {"description": "Only those with this status", "schema": {"enum": list(TASK_STATES)}},
    "filter.model": {"description": "Only those of this model", "schema": {"type": "string"}},
    "filter.task_type": {"description": "Only those of this kind", "schema": {"enum": list(TASK_TYPES)}},
    "filter.task_ids": {
        "description": "Only these",
        "schema": {"type": "array", "items": {"type": "string", "pattern": VIDEO_ID}},
    },
}
_AFTER = {
    "/v1/videos": VIDEO_ID,
    "/v1/videos/{video_id}/attempts": "^attempt_[0-9]{1,18}$",
    "/v1/files": FILE_ID,
    "/v1/batches": BATCH_ID,
    "/v1/campaigns": BATCH_ID,
    "/v1/campaigns/{batch_id}/items": "^item_[0-9]{1,12}$",
    "/v1/projects": PROJECT,
    "/v1/api_keys": KEY_ID,
    "/v1/workers": WORKER_ID,
    "/v1/webhook_endpoints": ENDPOINT_ID,
    "/v1/webhook_deliveries": DELIVERY_ID,
}
PATH: dict[str, Object] = {
    "video_id": {"description": "Id of a video", "schema": {"type": "string", "pattern": VIDEO_ID}},
    "file_id": {"description": "Id of a file", "schema": {"type": "string", "pattern": FILE_ID}},
    "batch_id": {"description": "Id of a batch", "schema": {"type": "string", "pattern": BATCH_ID}},
    "key_id": {"description": "Id of an API key", "schema": {"type": "string", "pattern": KEY_ID}},
    "endpoint_id": {"description": "Id of a webhook endpoint", "schema": {"type": "string", "pattern": ENDPOINT_ID}},
    "delivery_id": {"description": "Id of a webhook delivery", "schema": {"type": "string", "pattern": DELIVERY_ID}},
    "model_id": {"description": "Name of a model, slashes included", "schema": {"type": "string"}},
    "name": {"description": "Name of a project", "schema": {"type": "string", "pattern": PROJECT}},
    "worker_id": {"description": "Id of a replica", "schema": {"type": "string", "pattern": WORKER_ID}},
}


def query_parameter(name: str, path: str, method: str) -> Object:
    """What `name` means in the query of this route."""
    known = _QUERY
    if path == "/v1/webhook_deliveries":
        known = _QUERY | _QUERY_OF_DELIVERIES
    elif path == "/v1/files":
        known = _QUERY | _QUERY_OF_FILES
    elif path == "/v1/campaigns/{batch_id}/items":
        known = _QUERY
    elif path.startswith(("/v1/batches", "/v1/campaigns")):
        known = _QUERY_OF_OPTIONS | _QUERY_OF_CAMPAIGNS if method == "POST" else _QUERY | _QUERY_OF_CAMPAIGNS
    elif path.startswith("/v1/queue"):
        known = _QUERY | _QUERY_OF_QUEUE
    elif path.startswith(MINIMAX_PREFIX):
        known = _QUERY_OF_TASKS
    about: Object = {"schema": {"type": "string"}, **known.get(name, {})}
    if name == "after" and path in _AFTER:
        about["schema"] = {"type": "string", "pattern": _AFTER[path]}
    return {"name": name, "in": "query", **about}
