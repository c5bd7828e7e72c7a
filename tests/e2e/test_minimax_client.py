"""The client of MiniMax's video API that docs/api.md tells people to paste, pasted, against the whole service."""

import re
import subprocess
import sys
from pathlib import Path

import av
from support.api import API_KEY
from support.service import Service

GUIDE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_it_renders_by_another_base_url_and_key(service: Service, tmp_path: Path) -> None:
    (code,) = (one for one in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "/v2/video_generation" in one)
    for told, here in (
        ("http://127.0.0.1:8000", str(service.http.base_url)),
        ('key = "..."', f"key = {API_KEY!r}"),
        ('"resolution": "768P"', '"resolution": "480P"'),
        ('"ratio": "16:9"', '"ratio": "1:1"'),
        ('"duration": 5', '"duration": 4'),
        ("time.sleep(5)", "time.sleep(0.5)"),
    ):
        assert code.count(told) == 1, told
        code = code.replace(told, here)
    script = tmp_path / "client.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with av.open(tmp_path / "lighthouse.mp4") as clip:
        (video,), (audio,) = clip.streams.video, clip.streams.audio
        assert (video.width, video.height, video.frames) == (480, 480, 107)
        assert audio.duration
