"""Unwraps webhooks with the `openai` package that this process finds: requests as JSON in, what it says of each out."""

import json
import sys
from typing import Any

import openai


def unwrap(sent: dict[str, Any]) -> dict[str, Any]:
    client = openai.OpenAI(api_key="none", webhook_secret=sent["secret"])
    event = client.webhooks.unwrap(sent["body"].encode(), sent["headers"])
    try:
        client.webhooks.unwrap(sent["body"].encode() + b" ", sent["headers"])
    except openai.InvalidWebhookSignatureError:
        is_checked = True
    else:
        is_checked = False
    said = {"id": event.id, "type": event.type, "subject_id": event.data.id, "created_at": event.created_at}  # type: ignore[union-attr]
    return {"openai": openai.__version__, "is_checked": is_checked, **said}


print(json.dumps([unwrap(one) for one in json.load(sys.stdin)]))
