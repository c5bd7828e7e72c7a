"""Unwraps a webhook with the `openai` package that this process finds: a request as JSON in, what it says out."""

import json
import sys

import openai

sent = json.load(sys.stdin)
client = openai.OpenAI(api_key="none", webhook_secret=sent["secret"])
event = client.webhooks.unwrap(sent["body"].encode(), sent["headers"])
try:
    client.webhooks.unwrap(sent["body"].encode() + b" ", sent["headers"])
except openai.InvalidWebhookSignatureError:
    is_checked = True
else:
    is_checked = False
said = {"id": event.id, "type": event.type, "video_id": event.data.id, "created_at": event.created_at}  # type: ignore[union-attr]
print(json.dumps({"openai": openai.__version__, "is_checked": is_checked, **said}))
