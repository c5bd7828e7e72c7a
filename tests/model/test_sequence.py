import hashlib

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, patchify_video_latents
from rushes_worker.model.sequence import Modality, PackedSequence, audio_latents, patches
from support.tiny_model import tiny_config


def build(
    text_length: int, audio: int, frames: int, height: int = 48, width: int = 84, **changes: object
) -> PackedSequence:
    return PackedSequence.build(
        tiny_config(**changes),
        text_length=text_length,
        audio_latents=audio,
        latent_frames=frames,
        latent_height=height,
        latent_width=width,
    )


@pytest.mark.parametrize(
    ("text_length", "audio", "frames", "digest"),
    [
        (1000, 207, 37, "0b49b2b90f43730b"),
        (1000, 405, 72, "4ada649e7b35b606"),
        (1000, 603, 107, "3d2064fdf6b770b6"),
        (10000, 405, 72, "c23d2aa0af152cfc"),
    ],
)
def test_position_table_is_that_of_the_reference(text_length: int, audio: int, frames: int, digest: str) -> None:
    positions = build(text_length, audio, frames).positions_S3
    assert positions.dtype == torch.float64
    assert hashlib.sha256(positions.contiguous().numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("frames", "audio", "end", "sound"), [(37, 207, 1200.0, 1206.0), (72, 405, 1398 + 1 / 3, 1404.0)]
)
def test_positions_of_the_widescreen_canvas(frames: int, audio: int, end: float, sound: float) -> None:
    sequence = build(1000, audio, frames)
    video = sequence.positions_S3[sequence.rows_of(Modality.VIDEO)].view(frames, 24, 42, 3)
    assert video[0, 0, 0].tolist() == [1000.0, 3.9051368637047297, -5.166010488516722]
    assert video[-1, -1, -1].tolist() == pytest.approx([end, 27.08695787493733, 36.15810522715877], abs=1e-12)
    step = video[0, 0, 1, 2] - video[0, 0, 0, 2]
    assert step == pytest.approx(1.007905261357939, abs=1e-12)
    starts = [0, 1.6667, 8.3333, 15, 21.6667, 28.3333, 30]
    assert (video[:7, 0, 0, 0] - 1000).tolist() == pytest.approx(starts, abs=1e-4)
    assert sequence.positions_S3[sequence.rows_of(Modality.AUDIO)][-1].tolist() == [
        sound,
        0.0,
        video[0, 0, -1, 2].item(),
    ]


@pytest.mark.parametrize("latents", [(1, 3, 2, 2, 2), (7, 5, 12, 6, 10), (63, 207, 37, 30, 52)])
def test_layout_equals_diffusers(latents: tuple[int, int, int, int, int]) -> None:
    text_length, audio, frames, height, width = latents
    sequence = build(text_length, audio, frames, height, width)
    positions, tags, video_rows, audio_rows, text_rows, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(text_length, dtype=torch.long), frames, height, width, audio, (1, 2, 2), 2, 2, 0
    )
    assert torch.equal(sequence.positions_S3, positions)
    for segment in sequence.segments:
        assert tags[segment.start : segment.stop].eq(segment.modality).all()
    rows = torch.arange(sequence.num_rows)
    assert torch.equal(rows[sequence.rows_of(Modality.TEXT)], text_rows)
    assert torch.equal(rows[sequence.rows_of(Modality.AUDIO)], audio_rows)
    assert torch.equal(rows[sequence.rows_of(Modality.VIDEO)], video_rows)


def test_rotary_table_equals_diffusers() -> None:
    sequence = build(1000, 207, 37, rope_freq_dim=16)
    cos, sin = MiniMaxH3RotaryPosEmbed(16, 10000.0)(sequence.positions_S3)
    assert torch.equal(torch.cat([sequence.cos_SR, sequence.cos_SR], dim=-1), cos)
    assert torch.equal(torch.cat([sequence.sin_SR, sequence.sin_SR], dim=-1), sin)


def test_a_square_canvas_spans_thirty_two() -> None:
    sequence = build(1, 1, 1, 8, 8)
    video = sequence.positions_S3[sequence.rows_of(Modality.VIDEO)]
    assert video[:, 1].unique().tolist() == [0.0, 8.0, 16.0, 24.0]


@pytest.mark.parametrize("length", [1, 63, 64, 129, 192])
def test_a_text_capacity_serves_every_length(length: int) -> None:
    lengths = {"audio_latents": 9, "latent_frames": 6, "latent_height": 10, "latent_width": 14}
    config = tiny_config()
    exact = PackedSequence.build(config, text_length=length, **lengths)
    built = PackedSequence.build(config, text_length=length, text_capacity=192, **lengths)
    changed = PackedSequence.build(config, text_length=100, text_capacity=192, **lengths)
    changed.shorten_text_(torch.tensor([length]), config)
    for sequence in (built, changed):
        counted = sequence.tiles.counted_S
        assert counted.nonzero().squeeze(1).tolist() == [*range(length), *range(192, sequence.num_rows)]
        for name in ("cos_SR", "sin_SR", "tags_S"):
            assert torch.equal(getattr(sequence, name)[counted], getattr(exact, name)), name
        assert torch.equal(sequence.tiles.sizes_n[sequence.tiles.sizes_n > 0], exact.tiles.sizes_n)


def test_a_prompt_that_the_text_capacity_does_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="64 rows does not hold 65 tokens"):
        PackedSequence.build(
            tiny_config(),
            text_length=65,
            text_capacity=64,
            audio_latents=1,
            latent_frames=1,
            latent_height=2,
            latent_width=2,
        )


def test_tiles_keep_text_and_audio_apart() -> None:
    sequence = build(70, 35, 5, 6, 10)
    assert sequence.tiles.num_prefix_tiles == 2 + 2
    assert sequence.tiles.num_prefix_rows == 140
    assert sequence.tiles.num_rows == sequence.num_rows == 140 + 5 * 3 * 5


@pytest.mark.parametrize("name", ["text_length", "audio_latents", "latent_frames", "latent_height", "latent_width"])
def test_empty_lengths_are_refused(name: str) -> None:
    lengths = {"text_length": 1, "audio_latents": 1, "latent_frames": 1, "latent_height": 2, "latent_width": 2}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        PackedSequence.build(tiny_config(), **{**lengths, name: 0})


def test_latents_must_divide_into_patches() -> None:
    with pytest.raises(ValueError, match="3 x 4"):
        build(1, 1, 1, 3, 4)


class TestPatches:
    def rows(self, latents: torch.Tensor) -> torch.Tensor:
        return patches(latents, (1, 2, 2)).flatten(0, 2).flatten(1)

    def test_equal_diffusers(self) -> None:
        latents = torch.randn(4, 3, 6, 10, generator=torch.Generator().manual_seed(0))
        assert torch.equal(self.rows(latents), patchify_video_latents(latents[None], (1, 2, 2)))

    def test_are_the_latents_themselves(self) -> None:
        latents, copy = torch.randn(4, 3, 6, 10, generator=torch.Generator().manual_seed(0)), torch.empty(4, 3, 6, 10)
        patches(copy, (1, 2, 2)).copy_(self.rows(latents).view(3, 3, 5, 4, 1, 2, 2))
        assert torch.equal(copy, latents)

    def test_features_are_channel_then_row_then_column(self) -> None:
        latents = torch.arange(2 * 4 * 4).view(2, 1, 4, 4)
        assert self.rows(latents)[1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]


def test_audio_rows_hold_the_left_channel_first() -> None:
    rows = torch.arange(2 * 3 * 2).view(6, 2)
    latents = audio_latents(rows)
    assert latents.shape == (2, 2, 3)
    assert latents[0].tolist() == [[0, 2, 4], [1, 3, 5]]
