"""An encoder that makes no clip here is refused before anything is claimed."""

import os
from pathlib import Path

import pytest
from rushes_core.settings import Settings
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.trial import h264_encoders, try_encoder


def settings(**values: object) -> Settings:
    return Settings(
        database_url="postgresql+psycopg://u:p@127.0.0.1/d",
        redis_url="redis://127.0.0.1/0",
        s3_bucket="media",
        checkpoint=Path("checkpoint"),
        **values,  # pyright: ignore[reportArgumentType]
    )


class TestSettings:
    def test_the_encoder_is_what_the_deployment_says(self) -> None:
        found = EncoderSettings.of(
            settings(
                encoder_preset="fast",
                encoder_crf=30,
                keyframe_interval=24,
                audio_bitrate=96_000,
                encoders=3,
                flawed_clips="fail",
            ),
            replicas=1,
        )
        expected = EncoderSettings(
            preset="fast", crf=30, keyframe_interval=24, audio_bitrate=96_000, encoders=3, refuse_flaws=True
        )
        assert found == expected

    def test_without_a_word_it_is_the_default(self) -> None:
        found = EncoderSettings.of(settings(encoders=1), replicas=1)
        assert found == EncoderSettings()

    @pytest.mark.parametrize(("replicas", "encoders"), [(1, 8), (2, 4), (8, 1), (64, 1)])
    def test_replicas_share_the_cores(self, monkeypatch: pytest.MonkeyPatch, replicas: int, encoders: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
        assert EncoderSettings.of(settings(), replicas=replicas).encoders == encoders

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (
                {"encoder_preset": "placebo"},
                "RUSHES_ENCODER_PRESET='placebo' is not one of libx264's: ultrafast, .* slow",
            ),
            ({"encoder": "h264_nvenc", "encoder_preset": "fast"}, "'fast' is not one of h264_nvenc's: p1, .* p7"),
        ],
    )
    def test_a_preset_of_another_encoder_is_refused_with_those_that_there_are(
        self, values: dict[str, str], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            EncoderSettings.of(settings(**values), replicas=1)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("encoder", "x265"),
            ("encoder_crf", 0),
            ("keyframe_interval", 241),
            ("encoders", 65),
            ("audio_bitrate", 8_000),
        ],
    )
    def test_a_value_out_of_range_is_refused_by_name(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=field):
            settings(**{field: value})


class TestTrial:
    @pytest.mark.parametrize("preset", ["ultrafast", "veryfast", "slow"])
    def test_one_that_works_leaves_nothing(self, tmp_path: Path, preset: str) -> None:
        try_encoder(EncoderSettings(preset=preset, refuse_flaws=True), tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_one_whose_device_is_missing_is_refused_with_what_was_found(self, tmp_path: Path) -> None:
        if Path("/dev/nvidia0").exists():
            pytest.skip("this machine has an NVIDIA device")
        with pytest.raises(
            ValueError, match=r"RUSHES_ENCODER=h264_nvenc .*RUSHES_ENCODER_PRESET=p4.* makes no clip here: .*libx264"
        ):
            try_encoder(EncoderSettings(encoder="h264_nvenc"), tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_h264_encoders_are_named_as_ffmpeg_names_them(self) -> None:
        assert "libx264" in h264_encoders()
        assert not {"h264", "libx265", "aac"} & set(h264_encoders())
