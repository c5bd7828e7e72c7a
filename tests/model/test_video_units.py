"""Temporal units and pixels, without a model."""

import pytest
import torch
from rushes_worker.model.video_units import TemporalUnits, cross_fade, to_uint8

RELEASED = TemporalUnits(clip_length=17, token_drop=3, temporal_compression=4)


def test_released_units_decode_seven_latents_to_28_frames() -> None:
    assert (RELEASED.latent_stride, RELEASED.unit_latents, RELEASED.unit_frames) == (5, 7, 28)
    assert (RELEASED.front_padding, RELEASED.tail_frames) == (3, 5)


@pytest.mark.parametrize("k", range(6, 22))
def test_k_units_make_17_k_plus_5_frames(k: int) -> None:
    num_latent_frames = 5 * k + 2
    assert RELEASED.num_units(num_latent_frames) == k
    assert RELEASED.num_frames(num_latent_frames) == 17 * k + 5
    assert RELEASED.latent_frames(k - 1) == slice(5 * k - 5, num_latent_frames)
    units = [torch.zeros(3, 28, 1, 1)] * k
    lengths = [frames.shape[1] for frames in RELEASED.assemble(units)]
    assert lengths == [17] * (k - 1) + [22]


@pytest.mark.parametrize("num_latent_frames", [0, 2, 6, 8, 36])
def test_latent_frames_that_fill_no_unit_are_refused(num_latent_frames: int) -> None:
    with pytest.raises(ValueError, match=f"{num_latent_frames} latent frames"):
        RELEASED.num_units(num_latent_frames)


def test_a_clip_without_dropped_latents_has_no_tail() -> None:
    units = TemporalUnits(clip_length=8, token_drop=0, temporal_compression=2)
    assert (units.unit_latents, units.front_padding, units.tail_frames) == (4, 0, 0)
    assert [f.flatten().tolist() for f in units.assemble([torch.arange(8.0).view(1, 8, 1, 1)] * 2)] == [
        list(range(8))
    ] * 2


def test_body_and_tail_leave_the_padding_out() -> None:
    body, tail = RELEASED.split(torch.arange(28.0).view(1, 28, 1, 1))
    assert body.flatten().tolist() == list(range(3, 20))
    assert tail.flatten().tolist() == list(range(23, 28))


def test_a_body_fades_in_over_the_tail_before_it() -> None:
    tail, body = torch.full((3, 5, 2, 2), 10.0), torch.zeros(3, 17, 2, 2)
    faded = cross_fade(tail, body)
    torch.testing.assert_close(faded[0, :7, 0, 0], torch.tensor([10.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]))
    assert body.eq(0).all()


def test_pixels_undo_the_normalisation_and_are_clamped() -> None:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    rgb = torch.randint(0, 256, (2, 3, 4, 3), dtype=torch.uint8)
    normalised = ((rgb / 255 - mean) / std).permute(3, 0, 1, 2)
    pixels = to_uint8(normalised)
    assert pixels.is_contiguous()
    assert torch.equal(pixels, rgb)
    assert to_uint8(torch.full((3, 1, 1, 1), 99.0)).flatten().tolist() == [255] * 3
    assert to_uint8(torch.full((3, 1, 1, 1), -99.0)).flatten().tolist() == [0] * 3
