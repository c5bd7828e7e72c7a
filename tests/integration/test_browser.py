"""A clip plays to its end and seeks in Chromium, from the URL of its content."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rushes_core.settings import Settings
from rushes_worker.media.settings import EncoderSettings
from starlette.testclient import TestClient
from support.api import AUTHORIZED, JobDriver, ThreadedApi
from support.browser import NAMES, Browser, find_browser
from support.media import grey_frames, grey_level, make_clip, tone

NUM_FRAMES = 107
SIZE = 160

SEEK = """
const video = document.querySelector("video");
video.pause();
const seeked = new Promise(resolve => video.addEventListener("seeked", resolve, {once: true}));
video.currentTime = %f;
await seeked;
for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
const canvas = document.createElement("canvas");
canvas.width = video.videoWidth;
canvas.height = video.videoHeight;
const context = canvas.getContext("2d");
context.drawImage(video, 0, 0);
return context.getImageData(80, 80, 1, 1).data[1];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = find_browser()
    if command is None:
        pytest.skip(f"no browser is installed ({', '.join(NAMES)}, or CHROMIUM)")
    with Browser(command, tmp_path_factory.mktemp("browser"), AUTHORIZED) as browser:
        yield browser


@pytest.fixture(scope="module", params=[17, 51], ids=lambda interval: f"keyframe every {interval}")
def playing(
    request: pytest.FixtureRequest,
    browser: Browser,
    client: TestClient,
    driver: JobDriver,
    api_settings: Settings,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Browser]:
    """The browser with a clip whose frames differ in their grey."""
    folder: Path = tmp_path_factory.mktemp("clip")
    settings = EncoderSettings(keyframe_interval=request.param)
    clip = make_clip(folder / "clip.mp4", grey_frames(NUM_FRAMES, SIZE, SIZE), tone(NUM_FRAMES), settings)
    video_id: str = client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
    driver.complete(video_id, clip.read_bytes(), folder)
    with ThreadedApi(api_settings) as api:
        browser.open(f"{api.url}/v1/videos/{video_id}/content")
        browser.run("""
            while (!document.querySelector("video")) await new Promise(resolve => setTimeout(resolve, 20));
            const video = document.querySelector("video");
            video.muted = true;
            while (video.readyState < 2 && !video.error) await new Promise(resolve => setTimeout(resolve, 20));
        """)
        yield browser
        browser.open("about:blank")


def test_its_size_and_length_are_those_of_the_clip(playing: Browser) -> None:
    width, height, seconds, error = playing.run("""
        const video = document.querySelector("video");
        return [video.videoWidth, video.videoHeight, video.duration, video.error && video.error.message];
    """)
    assert error is None
    assert (width, height) == (SIZE, SIZE)
    assert seconds == pytest.approx(NUM_FRAMES / 24, abs=0.04)


def test_it_plays_to_the_end_with_sound(playing: Browser) -> None:
    ended, at, sound = playing.run("""
        const video = document.querySelector("video");
        video.currentTime = 0;
        video.playbackRate = 4;
        const ended = new Promise(resolve => {
            video.addEventListener("ended", () => resolve(true), {once: true});
            video.addEventListener("error", () => resolve(video.error.message), {once: true});
        });
        await video.play();
        return [await ended, video.currentTime, video.webkitAudioDecodedByteCount];
    """)
    assert ended is True
    assert at == pytest.approx(NUM_FRAMES / 24, abs=0.04)
    assert sound > 0


def test_it_seeks_to_any_frame(playing: Browser) -> None:
    levels = [playing.run(SEEK % ((frame + 0.5) / 24)) for frame in (100, 3, 51, 50, 16, 17, 0, 106, 84)]
    expected = [grey_level(frame) for frame in (100, 3, 51, 50, 16, 17, 0, 106, 84)]
    np.testing.assert_allclose(levels, expected, atol=4)
