"""The released sizes: parameter counts of the published components, and weights that are drawn when they are loaded."""

from math import prod
from pathlib import Path

import pytest
import torch
from rushes_core.prompt import PromptTokenizer
from rushes_worker.checkpoint.manifest import Manifest, text_encoder_tensors, transformer_tensors, video_vae_tensors
from rushes_worker.checkpoint.released import TEXT_ENCODER, TRANSFORMER, VIDEO_VAE, synthetic_checkpoint
from rushes_worker.checkpoint.tiny import VISION


def parameters(manifest: Manifest, part: str = "") -> int:
    return sum(prod(spec.shape) for name, spec in manifest.items() if part in name)


def test_transformer_has_the_published_number_of_parameters() -> None:
    manifest = transformer_tensors(TRANSFORMER)
    assert parameters(manifest) == 33_122_992_896 + 1_926_758_400
    assert parameters(manifest, "to_gate_compress") == 1_926_758_400


def test_text_encoder_layer_and_embedding_have_the_published_number_of_parameters() -> None:
    manifest = text_encoder_tensors(TEXT_ENCODER, VISION)
    assert parameters(manifest, "language_model.layers.7.") == 487_587_840 + 2 * 5120 + 2 * 128
    assert parameters(manifest, "embed_tokens") == 777_912_320


def test_video_decoder_has_the_published_number_of_parameters() -> None:
    manifest = video_vae_tensors(VIDEO_VAE)
    assert sum(prod(spec.shape) for name, spec in manifest.items() if name.startswith("decoder.")) == 2_423_530_496


class TestSyntheticWeights:
    name = "transformer_blocks.3.attn.norm_q.weight"

    @pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae", "audio_vae"])
    def test_every_component_is_there(self, tmp_path: Path, component: str) -> None:
        assert synthetic_checkpoint(tmp_path, seed=0, device="cpu").weights(component)

    def test_seed_and_name_decide_a_tensor(self, tmp_path: Path) -> None:
        first, again, other = (
            synthetic_checkpoint(tmp_path / str(i), seed=seed, device="cpu").weights("transformer")
            for i, seed in enumerate((0, 0, 1))
        )
        assert torch.equal(first.get(self.name), again.get(self.name))
        assert not torch.equal(first.get(self.name), other.get(self.name))
        assert not torch.equal(first.get(self.name), first.get(self.name.replace("norm_q", "norm_k")))

    def test_part_of_a_tensor_equals_the_whole(self, tmp_path: Path) -> None:
        weights = synthetic_checkpoint(tmp_path, seed=0, device="cpu").weights("vae")
        name = "decoder.transformer_blocks.0.attn.to_q.weight"
        whole = weights.get(name)
        assert torch.equal(weights.get(name, rows=slice(64, 128)), whole[64:128])
        assert torch.equal(weights.get(name, columns=slice(3, 5)), whole[:, 3:5])

    def test_prompt_has_one_token_per_byte(self, tmp_path: Path) -> None:
        checkpoint = synthetic_checkpoint(tmp_path, seed=0, device="cpu")
        tokenizer = PromptTokenizer(checkpoint.tokenizer_path / "tokenizer.json")
        assert len(tokenizer.encode("waves roll against the lighthouse.", max_tokens=100)) == 34
