"""How a finished clip reaches its client."""

from pathlib import Path

import httpx
from rushes_core.settings import ContentDelivery
from support.api import AUTHORIZED, ApiProcess
from support.service import Rendered, Service


def test_redirect_leads_to_the_same_bytes(service: Service, reference: Rendered, tmp_path: Path) -> None:
    settings = service.settings.model_copy(update={"content_delivery": ContentDelivery.REDIRECT})
    with (
        ApiProcess(settings, tmp_path / "api.log") as api,
        httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=60, trust_env=False) as http,
    ):
        redirected = http.get(f"/v1/videos/{reference.id}/content")
    assert redirected.status_code == 302
    # whoever has the URL needs no key
    clip = httpx.get(redirected.headers["location"], timeout=60, trust_env=False)
    assert clip.status_code == 200
    assert clip.headers["content-type"] == "video/mp4"
    assert reference.id in clip.headers["content-disposition"]
    assert clip.content == reference.data


def test_ranges_add_up_to_the_clip(service: Service, reference: Rendered) -> None:
    middle = len(reference.data) // 2
    parts = [
        service.http.get(f"/v1/videos/{reference.id}/content", headers={"Range": wanted})
        for wanted in (f"bytes=0-{middle - 1}", f"bytes={middle}-")
    ]
    assert {part.status_code for part in parts} == {206}
    assert b"".join(part.content for part in parts) == reference.data
