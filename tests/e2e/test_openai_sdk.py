"""The whole life of a clip through OpenAI's SDK."""

import openai
import pytest
from openai import OpenAI
from support.api import API_KEY
from support.service import REQUEST, Service
from support.worker import eventually

# the SDK marks its own videos resource so
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


def test_sdk_creates_polls_downloads_lists_and_deletes(service: Service) -> None:
    with OpenAI(base_url=f"{service.api.url}/v1", api_key=API_KEY, timeout=60) as sdk:
        video = sdk.videos.create_and_poll(prompt=REQUEST["prompt"], seconds="4", size=REQUEST["size"])
        assert (video.status, video.progress, video.error) == ("completed", 100, None)
        assert (video.seconds, video.size) == ("4", "480x480")

        (stored,) = service.stored(video.id).values()
        assert sdk.videos.download_content(video.id).read() == stored
        assert video.id in [listed.id for listed in sdk.videos.list(limit=1)]

        deleted = sdk.videos.delete(video.id)
        assert (deleted.id, deleted.deleted) == (video.id, True)
        assert sdk.videos.delete(video.id).deleted is True
        for ask in (sdk.videos.retrieve, sdk.videos.download_content):
            with pytest.raises(openai.APIStatusError) as gone:
                ask(video.id)
            assert gone.value.code == "video_deleted"
        assert video.id not in [listed.id for listed in sdk.videos.list()]
    eventually(lambda: not service.stored(video.id), seconds=20)
