"""Clip arithmetic: what a request of so many seconds or frames becomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rushes_core.clip import ADMISSIBLE_FRAMES, Clip, frames_for

# seconds -> frames, latent frames, audio latents (FastH3 reference)
GOLDEN = [
    (4, 107, 32, 178),
    (5, 124, 37, 207),
    (10, 243, 72, 405),
    (15, 362, 107, 603),
]


@pytest.mark.parametrize(("seconds", "frames", "latents", "audio"), GOLDEN)
def test_seconds_become_frames_and_latents(seconds: float, frames: int, latents: int, audio: int) -> None:
    clip = Clip.for_seconds(seconds)
    assert (clip.num_frames, clip.num_latent_frames, clip.num_audio_latents) == (frames, latents, audio)


def test_the_longest_request_is_served_although_its_clip_lasts_longer() -> None:
    clip = Clip.for_seconds(15)
    assert clip.num_frames == 362
    assert clip.duration_seconds > 15


@pytest.mark.parametrize("seconds", [4, 14.4, 15])
def test_seconds_within_the_range_are_served(seconds: float) -> None:
    assert Clip.for_seconds(seconds).duration_seconds >= seconds - 0.5 / 24


@pytest.mark.parametrize("seconds", [3.9, 3.999, 15.0001, 15.1, 16, 0, -1, float("nan"), float("inf")])
def test_seconds_outside_the_range_are_refused_with_it(seconds: float) -> None:
    with pytest.raises(ValueError, match="between 4 and 15"):
        Clip.for_seconds(seconds)


@pytest.mark.parametrize(("asked", "served"), [(96, 107), (107, 107), (108, 124), (346, 362), (360, 362), (362, 362)])
def test_frames_are_rounded_up_to_the_grid(asked: int, served: int) -> None:
    assert Clip.for_frames(asked).num_frames == served


@pytest.mark.parametrize("frames", [0, 95, 363, 379, -5])
def test_frames_outside_the_range_are_refused_with_it(frames: int) -> None:
    with pytest.raises(ValueError, match=f"between 96 and 362, got {frames}"):
        Clip.for_frames(frames)


def test_a_clip_of_another_length_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="num_frames=125"):
        Clip(125)


def test_admissible_lengths_are_those_of_the_grid() -> None:
    assert tuple(17 * k + 5 for k in range(6, 22)) == ADMISSIBLE_FRAMES


@given(st.integers(6, 362))
def test_rounding_up_never_shortens_and_adds_less_than_a_unit(frames: int) -> None:
    assert 0 <= frames_for(frames) - frames < 17
    assert frames_for(frames) % 17 == 5


@given(st.sampled_from(ADMISSIBLE_FRAMES))
def test_sound_lasts_as_long_as_the_picture(frames: int) -> None:
    clip = Clip(frames)
    assert abs(clip.num_audio_samples / 32_000 - clip.duration_seconds) <= 0.5 / 32_000
    # a latent covers 800 samples: what is decoded is cut or padded by less than one of them
    assert abs(clip.num_audio_latents * 800 - clip.num_audio_samples) <= 400
