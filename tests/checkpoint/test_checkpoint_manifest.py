"""The exact set of tensors: against the published counts, and against Diffusers for sizes of every kind."""

import json
import struct
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from rushes_worker.checkpoint.configs import (
    AudioVaeConfig,
    TextEncoderConfig,
    TransformerConfig,
    VideoVaeConfig,
    VisionConfig,
)
from rushes_worker.checkpoint.directory import open_checkpoint
from rushes_worker.checkpoint.manifest import (
    Manifest,
    audio_vae_tensors,
    text_encoder_tensors,
    transformer_tensors,
    video_vae_tensors,
)
from support.checkpoints import copy_checkpoint, edit_json

TRANSFORMER = TransformerConfig(
    56, 128, 5376, 50, 2, 14336, 24, 32, (1, 2, 2), 5120, 256, 5376, 2688, 16, 10000.0, 1e-5, 1e-5, 1e-5
)
VIDEO_VAE = VideoVaeConfig(
    3, 3, 24, (128, 256, 256, 512, 512, 1024), 2, (2, 2, 2, 2, 1, 1), (1, 2, 2, 1, 1, 1), 32, 1e-6, "reflect",
    36, 32, 64, 4, 4, 100.0, 0.75, 1e-5, 17, 3, (0.0,) * 24, (1.0,) * 24,
)  # fmt: skip
AUDIO_VAE = AudioVaeConfig(
    64, (2, 4, 4, 5, 5), 2048, 32, 8, 1024, (5, 5, 2, 2, 2, 2, 2), (9, 9, 4, 4, 4, 4, 4), (3, 7, 11),
    ((1, 3, 5), (1, 3, 5), (1, 3, 5)), 32000, (0.0,) * 32, (1.0,) * 32,
)  # fmt: skip
TEXT = TextEncoderConfig(151936, 5120, 25600, 64, 64, 8, 128, 5e6, 1e-6, 262144)
VISION = VisionConfig(27, 1152, 4304, 16, 3, 16, 2, 2, 5120, 2304, (8, 16, 24))


def parameters(manifest: Manifest, prefix: str = "") -> int:
    return sum(prod(spec.shape) for name, spec in manifest.items() if name.startswith(prefix))


def test_released_transformer() -> None:
    manifest = transformer_tensors(TRANSFORMER)
    assert len(manifest) == 688
    assert parameters(manifest) == 35_049_751_296
    assert sum(spec.num_bytes for spec in manifest.values()) == 70_133_946_880
    assert sum(prod(spec.shape) for spec in manifest.values() if spec.dtype == "F32") == 17_222_144


def test_released_video_vae() -> None:
    manifest = video_vae_tensors(VIDEO_VAE)
    assert len(manifest) == 703
    assert parameters(manifest) == 2_603_868_984
    assert parameters(manifest, "decoder.") == 2_423_530_496
    assert parameters(manifest, "encoder.") == 180_335_536


def test_released_audio_vae() -> None:
    manifest = audio_vae_tensors(AUDIO_VAE)
    assert len(manifest) == 1087
    # the published count leaves out buffers
    trained = {name: spec for name, spec in manifest.items() if not name.endswith((".filter", "zero_k_bias"))}
    assert parameters(trained) == 151_321_489
    assert parameters({name: spec for name, spec in trained.items() if spec.used}) == 64_936_305


def test_released_text_encoder_uses_fifty_layers_and_the_embedding() -> None:
    manifest = text_encoder_tensors(TEXT, VISION)
    used = {name: spec for name, spec in manifest.items() if spec.used}
    norms = 2 * 5120 + 2 * 128
    assert parameters(used) == 50 * (487_587_840 + norms) + 777_912_320
    assert not any(".layers.50." in name or "visual" in name or name == "lm_head.weight" for name in used)
    assert 33.3e9 < parameters(manifest) < 33.5e9


def assert_same(manifest: Manifest, model: torch.nn.Module) -> None:
    ours = {name: spec.shape for name, spec in manifest.items() if "to_gate_compress" not in name}
    assert ours == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
class TestAgainstDiffusers:
    @pytest.mark.parametrize(
        "config", [TRANSFORMER, replace(TRANSFORMER, num_layers=3, num_refiner_layers=1, ffn_dim=96)]
    )
    def test_transformer(self, config: TransformerConfig) -> None:
        from diffusers import MiniMaxH3Transformer3DModel

        with torch.device("meta"):
            assert_same(transformer_tensors(config), MiniMaxH3Transformer3DModel(**asdict(config)))

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"layers_per_block": 3, "block_out_channels": (32, 32, 64, 64, 32, 32), "decoder_num_layers": 1},
            {"temporal_downsample_factors": (4, 1, 1, 1, 1, 1), "spatial_downsample_factors": (1, 4, 1, 2, 2, 1)},
        ],
    )
    def test_video_vae(self, changes: dict[str, Any]) -> None:
        from diffusers import AutoencoderKLMiniMaxH3

        config = replace(VIDEO_VAE, **changes)
        with torch.device("meta"):
            assert_same(video_vae_tensors(config), AutoencoderKLMiniMaxH3(**asdict(config)))

    @pytest.mark.parametrize(
        "changes",
        [
            {"latent_dim": 128, "decoder_dim": 128, "encoder_dim": 4},
            {
                "latent_dim": 64, "decoder_dim": 128, "encoder_dim": 2, "resblock_kernel_sizes": (3, 7),
                "resblock_dilation_sizes": ((1,), (1, 2, 3, 4)), "encoder_rates": (10, 80),
            },
        ],
    )  # fmt: skip
    def test_audio_vae(self, changes: dict[str, Any]) -> None:
        from diffusers import AutoencoderKLMiniMaxH3Audio

        config = replace(AUDIO_VAE, **changes)
        model = AutoencoderKLMiniMaxH3Audio(**asdict(config))
        assert_same(audio_vae_tensors(config), model)

    def test_text_encoder(self) -> None:
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        text = replace(TEXT, num_hidden_layers=3)
        settings = Qwen3VLConfig(
            text_config=asdict(text) | {"tie_word_embeddings": False},
            vision_config=asdict(VISION),
            tie_word_embeddings=False,
        )
        with torch.device("meta"):
            assert_same(text_encoder_tensors(text, VISION), Qwen3VLForConditionalGeneration(settings))


def test_checkpoint_of_the_released_size_opens_from_its_headers_alone(tiny: Path, tmp_path: Path) -> None:
    """All sizes are the published ones; the data are holes, so only headers can have been read."""
    path = copy_checkpoint(tiny, tmp_path / "released")
    for name, config, manifest, shards in (
        ("transformer", TRANSFORMER, transformer_tensors(TRANSFORMER), 14),
        ("vae", VIDEO_VAE, video_vae_tensors(VIDEO_VAE), 3),
        ("audio_vae", AUDIO_VAE, audio_vae_tensors(AUDIO_VAE), 1),
        ("text_encoder", None, text_encoder_tensors(TEXT, VISION), 14),
    ):
        write_holes(path / name, manifest, shards)
        if config is not None:
            edit_json(path / name / "config.json", **asdict(config))
    document = json.loads((path / "text_encoder" / "config.json").read_text())
    edit_json(
        path / "text_encoder" / "config.json",
        text_config=document["text_config"] | asdict(TEXT),
        vision_config=document["vision_config"] | asdict(VISION),
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.transformer_config == TRANSFORMER
    rows = checkpoint.weights("transformer").get("transformer_blocks.49.attn.to_q.weight", slice(7040, 7168))
    assert rows.shape == (128, 5376)


def write_holes(folder: Path, manifest: Manifest, shards: int) -> None:
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        old.unlink()
    stem = "model"
    names = sorted(manifest)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"{stem}.safetensors" if shards == 1 else f"{stem}-{number + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in names[number * size : (number + 1) * size]:
            spec = manifest[name]
            end = position + spec.num_bytes
            header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [position, end]}
            weight_map[name], position = file, end
        encoded = json.dumps(header).encode()
        with (folder / file).open("wb") as output:
            output.write(struct.pack("<Q", len(encoded)) + encoded)
            output.truncate(8 + len(encoded) + position)
    if shards > 1:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
