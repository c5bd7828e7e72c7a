"""Parity of the audio VAE decoder with Diffusers, on small random weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3Audio
from rushes_worker.checkpoint.configs import AudioVaeConfig
from rushes_worker.checkpoint.weights import InMemoryWeights
from rushes_worker.model.audio_vae import AudioVaeDecoder
from support.roughen import rescale, roughen
from torch import Tensor

# Diffusers builds its modules with torch's older weight_norm, whose key names the checkpoint has
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")

# fp32 against fp32 with other shapes of the same sums
ATOL = 2e-4

RELEASED_STAGES = AudioVaeConfig(
    encoder_dim=4,
    encoder_rates=(2, 4, 4, 5, 5),
    latent_dim=128,
    latent_channels=32,
    num_attention_heads=2,
    decoder_dim=128,
    decoder_rates=(5, 5, 2, 2, 2, 2, 2),
    decoder_kernel_sizes=(9, 9, 4, 4, 4, 4, 4),
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilation_sizes=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    sampling_rate=32000,
    latents_mean=tuple(0.05 * (i % 9) - 0.2 for i in range(32)),
    latents_std=tuple(0.8 + 0.03 * i for i in range(32)),
)

OTHER_STAGES = replace(
    RELEASED_STAGES,
    encoder_rates=(2, 3),
    latent_dim=32,
    latent_channels=8,
    decoder_dim=16,
    decoder_rates=(2, 3),
    decoder_kernel_sizes=(4, 7),
    resblock_kernel_sizes=(3, 7),
    resblock_dilation_sizes=((1, 3), (1, 3)),
    latents_mean=(0.1,) * 8,
    latents_std=(1.2,) * 8,
)


def reference(config: AudioVaeConfig, gain: float) -> AutoencoderKLMiniMaxH3Audio:
    torch.manual_seed(0)
    fields = {name: getattr(config, name) for name in AudioVaeConfig.__dataclass_fields__}
    vae = AutoencoderKLMiniMaxH3Audio(**fields).eval()
    roughen(vae)
    rescale(vae.decoder, {"weight_g": gain})
    return vae


def decoder(vae: AutoencoderKLMiniMaxH3Audio, config: AudioVaeConfig) -> AudioVaeDecoder:
    return AudioVaeDecoder(config, InMemoryWeights(vae.state_dict()), device="cpu")


def reference_decode(vae: AutoencoderKLMiniMaxH3Audio, config: AudioVaeConfig, latents: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).unsqueeze(-1) for values in (config.latents_mean, config.latents_std))
    return vae.decode(latents * std + mean).sample[:, 0]


@pytest.mark.parametrize(
    ("config", "gain", "num_latents"),
    [
        pytest.param(RELEASED_STAGES, 1.3, 1, id="one-latent"),
        pytest.param(RELEASED_STAGES, 1.3, 23, id="released-stages"),
        pytest.param(OTHER_STAGES, 1.5, 57, id="other-stages"),
    ],
)
@torch.inference_mode()
def test_waveform_equals_diffusers(config: AudioVaeConfig, gain: float, num_latents: int) -> None:
    vae = reference(config, gain)
    latents = torch.randn(2, config.latent_channels, num_latents)
    waveform = decoder(vae, config).decode(latents)
    expected = reference_decode(vae, config, latents)
    assert waveform.shape == (2, num_latents * config.hop)
    assert expected.std() > 0.02
    torch.testing.assert_close(waveform, expected, rtol=0, atol=ATOL)


@torch.inference_mode()
def test_loud_output_is_clamped_and_finite() -> None:
    waveform = decoder(reference(OTHER_STAGES, 4.0), OTHER_STAGES).decode(10 * torch.randn(2, 8, 40))
    assert waveform.isfinite().all()
    assert (waveform.min(), waveform.max()) == (-1.0, 1.0)


@torch.inference_mode()
def test_channels_do_not_mix() -> None:
    ours = decoder(reference(OTHER_STAGES, 1.5), OTHER_STAGES)
    left, right = torch.randn(2, 8, 12)
    both = ours.decode(torch.stack([left, right]))
    torch.testing.assert_close(ours.decode(torch.stack([right, left])), both.flip(0), rtol=0, atol=1e-6)


@torch.inference_mode()
def test_resampling_filters_come_from_the_checkpoint() -> None:
    vae = reference(OTHER_STAGES, 1.5)
    for name, buffer in vae.named_buffers():
        if name.endswith("filter"):
            buffer.copy_(F.normalize(torch.rand(12), p=1, dim=0))  # asymmetric, so that its direction counts
    latents = torch.randn(2, 8, 30)
    expected = reference_decode(vae, OTHER_STAGES, latents)
    torch.testing.assert_close(decoder(vae, OTHER_STAGES).decode(latents), expected, rtol=0, atol=ATOL)


def test_only_the_decoder_is_read() -> None:
    state = reference(OTHER_STAGES, 1.5).state_dict()
    wanted = {k: v for k, v in state.items() if k.startswith(("decoder.", "dec_in_proj."))}
    asked: set[str] = set()

    class Recording(InMemoryWeights):
        def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
            asked.add(name)
            return super().get(name, rows, columns)

    AudioVaeDecoder(OTHER_STAGES, Recording(wanted), device="cpu")
    assert asked == wanted.keys()


def test_a_filter_of_another_length_is_refused() -> None:
    state = reference(OTHER_STAGES, 1.5).state_dict()
    name = "decoder.activation_post.upsample.filter"
    with pytest.raises(ValueError, match=rf"{name} has 8 taps"):
        AudioVaeDecoder(OTHER_STAGES, InMemoryWeights({**state, name: torch.ones(1, 1, 8)}), device="cpu")


def test_latents_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 9, 4\)"):
        decoder(reference(OTHER_STAGES, 1.5), OTHER_STAGES).decode(torch.zeros(2, 9, 4))
