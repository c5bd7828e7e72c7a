"""Parity of the video VAE decoder with Diffusers, on small random weights."""

from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from rushes_worker.checkpoint.configs import VideoVaeConfig
from rushes_worker.checkpoint.weights import InMemoryWeights
from rushes_worker.model.video_units import to_uint8
from rushes_worker.model.video_vae import VideoVaeDecoder
from support.roughen import rescale, roughen
from torch import Tensor

# fp32 against fp32 with other shapes of the same sums; a wrong sign, half or offset costs 1e-2 and more.
ATOL = 2e-4

RELEASED_GEOMETRY = VideoVaeConfig(
    in_channels=3,
    out_channels=3,
    latent_channels=24,
    block_out_channels=(8, 8, 8, 8, 8, 8),
    layers_per_block=1,
    spatial_downsample_factors=(2, 2, 2, 2, 1, 1),
    temporal_downsample_factors=(1, 2, 2, 1, 1, 1),
    norm_num_groups=4,
    norm_eps=1e-6,
    spatial_padding_mode="reflect",
    decoder_num_layers=2,
    decoder_num_attention_heads=2,
    decoder_attention_head_dim=16,
    decoder_num_register_tokens=4,
    decoder_ffn_mult=2,
    decoder_rope_theta=100.0,
    decoder_rope_dim_ratio=0.75,
    decoder_norm_eps=1e-5,
    clip_length=17,
    token_drop=3,
    latents_mean=tuple(0.1 * (i % 7) - 0.3 for i in range(24)),
    latents_std=tuple(0.7 + 0.05 * i for i in range(24)),
)

OTHER_GEOMETRY = replace(
    RELEASED_GEOMETRY,
    latent_channels=4,
    block_out_channels=(8, 16),
    spatial_downsample_factors=(2, 2),
    temporal_downsample_factors=(2, 1),
    decoder_attention_head_dim=24,
    decoder_num_register_tokens=2,
    decoder_rope_dim_ratio=0.5,
    decoder_rope_theta=50.0,
    decoder_norm_eps=1e-3,
    clip_length=9,
    token_drop=2,
    latents_mean=(0.1, -0.2, 0.3, 0.0),
    latents_std=(1.1, 0.9, 1.2, 1.0),
)


def reference(config: VideoVaeConfig) -> AutoencoderKLMiniMaxH3:
    torch.manual_seed(0)
    fields = {name: getattr(config, name) for name in VideoVaeConfig.__dataclass_fields__}
    vae = AutoencoderKLMiniMaxH3(**fields).eval()
    roughen(vae.decoder)
    with torch.no_grad():
        for name, parameter in vae.decoder.named_parameters():
            if name.endswith(("scale1", "scale2")):  # zero at the start: without them the blocks do nothing
                parameter.normal_(0, 0.5)
        vae.decoder.register_tokens.normal_()
    rescale(vae.decoder, {".to_q.": 3.0, ".to_k.": 3.0, ".to_v.": 2.0, ".to_out.": 2.0})
    return vae


def decoder(vae: AutoencoderKLMiniMaxH3, config: VideoVaeConfig) -> VideoVaeDecoder:
    return VideoVaeDecoder(config, InMemoryWeights(vae.state_dict()), device="cpu", dtype=torch.float32)


def reference_decode(vae: AutoencoderKLMiniMaxH3, config: VideoVaeConfig, latents: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    return vae.decode((latents * std + mean).unsqueeze(0)).sample[0]


CASES = [
    pytest.param(RELEASED_GEOMETRY, 17, 6, 9, id="one-small-tile"),
    pytest.param(RELEASED_GEOMETRY, 12, 16, 16, id="one-whole-tile"),
    pytest.param(RELEASED_GEOMETRY, 12, 30, 30, id="480x480"),
    pytest.param(RELEASED_GEOMETRY, 12, 26, 40, id="640x416"),
    pytest.param(RELEASED_GEOMETRY, 7, 5, 23, id="one-row-of-tiles"),
    pytest.param(OTHER_GEOMETRY, 13, 7, 70, id="other-geometry"),
]


@pytest.mark.parametrize(("config", "num_latent_frames", "height", "width"), CASES)
@torch.inference_mode()
def test_clip_equals_diffusers(config: VideoVaeConfig, num_latent_frames: int, height: int, width: int) -> None:
    vae = reference(config)
    ours = decoder(vae, config)
    latents = torch.randn(config.latent_channels, num_latent_frames, height, width)
    units = range(ours.units.num_units(num_latent_frames))
    decoded = (ours.decode_unit(latents[:, ours.units.latent_frames(unit)]) for unit in units)
    clip = torch.cat(list(ours.units.assemble(decoded)), dim=1)

    expected = reference_decode(vae, config, latents)
    assert clip.shape[1] == ours.units.num_frames(num_latent_frames)
    assert expected.std() > 0.1
    torch.testing.assert_close(clip, expected, rtol=0, atol=ATOL)

    mean, std = (torch.tensor(v).view(3, 1, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pixels = (expected * std + mean).clamp(0, 1).mul(255).round().permute(1, 2, 3, 0)
    # a value beside a rounding edge may fall to either side
    assert (to_uint8(clip).float() - pixels).abs().max() <= 1


@torch.inference_mode()
def test_result_is_independent_of_the_tile_batch() -> None:
    ours = decoder(reference(RELEASED_GEOMETRY), RELEASED_GEOMETRY)
    latents = torch.randn(24, 7, 20, 30)
    one = ours.decode_unit(latents, tile_batch=1)
    for tile_batch in (4, 6):
        torch.testing.assert_close(ours.decode_unit(latents, tile_batch=tile_batch), one, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "post_quant_conv.bias",
        "decoder.register_tokens",
        "decoder.norm_out.weight",
        "decoder.transformer_blocks.1.scale1",
        "decoder.transformer_blocks.1.scale2",
        "decoder.transformer_blocks.0.attn.to_q.bias",
        "decoder.transformer_blocks.0.norm2.weight",
    ],
)
@torch.inference_mode()
def test_every_kind_of_weight_matters_more_than_the_tolerance(name: str) -> None:
    state = reference(RELEASED_GEOMETRY).state_dict()
    latents = torch.randn(24, 7, 4, 4)
    changed = {**state, name: state[name] + 0.3 * torch.randn_like(state[name])}
    before, after = (
        VideoVaeDecoder(RELEASED_GEOMETRY, InMemoryWeights(w), device="cpu", dtype=torch.float32).decode_unit(latents)
        for w in (state, changed)
    )
    assert (before - after).abs().max() > 10 * ATOL


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 0.004), (torch.bfloat16, 0.03)])
@torch.inference_mode()
def test_half_precision_keeps_residual_and_norms_in_float32(dtype: torch.dtype, error: float) -> None:
    vae = reference(RELEASED_GEOMETRY)
    latents = torch.randn(24, 7, 4, 4)
    full = decoder(vae, RELEASED_GEOMETRY).decode_unit(latents)
    weights = InMemoryWeights(vae.state_dict())
    half = VideoVaeDecoder(RELEASED_GEOMETRY, weights, device="cpu", dtype=dtype).decode_unit(latents)
    assert half.dtype == torch.float32
    # 11 and 8 bits of mantissa through two blocks: a few roundings of values of order one
    assert (half - full).std() < error * full.std()


def test_only_the_decoder_is_read() -> None:
    state = reference(RELEASED_GEOMETRY).state_dict()
    wanted = {k: v for k, v in state.items() if k.startswith(("decoder.", "post_quant_conv."))}
    asked: set[str] = set()

    class Recording(InMemoryWeights):
        def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
            asked.add(name)
            return super().get(name, rows, columns)

    VideoVaeDecoder(RELEASED_GEOMETRY, Recording(wanted), device="cpu", dtype=torch.float32)
    assert asked == wanted.keys()


def test_latents_of_another_shape_are_refused() -> None:
    ours = decoder(reference(RELEASED_GEOMETRY), RELEASED_GEOMETRY)
    with pytest.raises(ValueError, match=r"\(24, 8, 4, 4\)"):
        ours.decode_unit(torch.zeros(24, 8, 4, 4))


def test_rotary_channels_that_do_not_fill_three_axes_are_refused() -> None:
    config = replace(RELEASED_GEOMETRY, decoder_rope_dim_ratio=0.5)
    with pytest.raises(ValueError, match="8 rotary channels"):
        VideoVaeDecoder(config, InMemoryWeights({}), device="cpu", dtype=torch.float32)
