"""The tiny checkpoint is whole, deterministic, servable, and loadable by the libraries that the layout comes from."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from rushes_core.tokenizer import H3_TOKENS, load_tokenizer
from rushes_worker.checkpoint.directory import COMPONENTS, open_checkpoint
from rushes_worker.checkpoint.tiny import PROFILES, write_tiny_checkpoint
from support.checkpoints import tiny_checkpoint


def files(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class TestWriting:
    @pytest.mark.parametrize("profile", list(PROFILES))
    def test_every_profile_opens(self, tmp_path: Path, profile: str) -> None:
        checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, profile=profile))
        assert checkpoint.contract.vsa_sparsity == (0.0 if profile == "dense" else 0.9)
        assert checkpoint.contract.num_forwards == 8
        assert checkpoint.contract.video_scheduler_shift == 10.0
        assert checkpoint.contract.audio_scheduler_shift == 3.0
        assert sum(map(len, files(checkpoint.path).values())) < 20_000_000

    def test_same_seed_gives_the_same_bytes(self, tiny: Path, tmp_path: Path) -> None:
        assert files(tiny_checkpoint(tmp_path)) == files(tiny)

    def test_another_seed_gives_other_weights(self, tiny: Path, tmp_path: Path) -> None:
        ours, other = files(tiny), files(tiny_checkpoint(tmp_path, seed=1))
        changed = {name for name in ours if ours[name] != other[name]}
        assert {name for name in ours if name.endswith(".safetensors")} <= changed
        assert not any(name.endswith("config.json") for name in changed)

    def test_gates_are_zero_only_in_the_dense_profile(self, tiny: Path, tmp_path: Path) -> None:
        name = "transformer_blocks.0.attn.to_gate_compress.weight"
        assert open_checkpoint(tiny).weights("transformer").get(name).abs().min() > 0
        assert not open_checkpoint(tiny_checkpoint(tmp_path, profile="dense")).weights("transformer").get(name).any()

    def test_no_absolute_path_is_stored(self, tiny: Path) -> None:
        assert not any(str(tiny.parent).encode() in data for data in files(tiny).values())

    def test_current_directory_can_be_filled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write_tiny_checkpoint(Path())
        open_checkpoint(tmp_path)

    def test_directory_with_content_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("kept")
        for force in (False, True):
            with pytest.raises(ValueError, match=r"not empty|something else than a tiny checkpoint"):
                write_tiny_checkpoint(tmp_path, force=force)
        assert files(tmp_path) == {"mine": b"kept"}

    def test_force_replaces_a_tiny_checkpoint(self, tmp_path: Path) -> None:
        write_tiny_checkpoint(tmp_path)
        (tmp_path / "transformer" / "stale.safetensors").touch()
        write_tiny_checkpoint(tmp_path, seed=3, force=True)
        open_checkpoint(tmp_path)

    def test_unknown_profile_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="profile 'huge' is not one of demo, dense, wide"):
            write_tiny_checkpoint(tmp_path / "new", profile="huge")
        assert not (tmp_path / "new").exists()


class TestWeightSource:
    def test_slice_equals_the_same_part_of_the_whole(self, tiny: Path) -> None:
        weights = open_checkpoint(tiny).weights("transformer")
        name = "transformer_blocks.1.ff.net.0.proj.weight"
        whole = weights.get(name)
        assert whole.dtype is torch.bfloat16
        assert torch.equal(weights.get(name, slice(96, 192)), whole[96:192])
        assert torch.equal(weights.get(name, None, slice(3, 9)), whole[:, 3:9])
        assert torch.equal(weights.get(name, slice(5, 7), slice(3, 9)), whole[5:7, 3:9])
        assert torch.equal(weights.get("proj_in.bias", slice(4, 8)), weights.get("proj_in.bias")[4:8])

    def test_unknown_name_is_refused_with_the_folder(self, tiny: Path) -> None:
        with pytest.raises(KeyError, match=r"/transformer: no tensor 'proj_in\.wieght'"):
            open_checkpoint(tiny).weights("transformer").get("proj_in.wieght")

    def test_float32_groups_stay_float32(self, tiny: Path) -> None:
        weights = open_checkpoint(tiny).weights("transformer")
        for name in ("proj_in", "audio_proj_in", "time_embedder.linear_1", "proj_out", "audio_proj_out"):
            assert weights.get(f"{name}.weight").dtype is torch.float32


class TestTokenizer:
    def test_prompt_has_one_token_a_byte(self, tiny: Path) -> None:
        ids = load_tokenizer(tiny / "tokenizer").encode("Zwölf 鯨!\n", add_special_tokens=False).ids
        assert len(ids) == len("Zwölf 鯨!\n".encode())

    def test_marks_of_h3_are_one_token_each(self, tiny: Path) -> None:
        tokenizer = load_tokenizer(tiny / "tokenizer")
        ids = tokenizer.encode("a" + "a".join(H3_TOKENS), add_special_tokens=False).ids
        assert ids[1::2] == list(range(282, 289))


class TestInterchange:
    """Nothing missing, nothing unexpected but the gates, which Diffusers does not know."""

    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        warnings.simplefilter("ignore")

    @pytest.mark.parametrize("profile", ["demo", "wide"])
    def test_diffusers_loads_every_model(self, tmp_path: Path, profile: str) -> None:
        import diffusers

        path = tiny_checkpoint(tmp_path, profile=profile)
        for folder, name in (
            ("transformer", "MiniMaxH3Transformer3DModel"),
            ("vae", "AutoencoderKLMiniMaxH3"),
            ("audio_vae", "AutoencoderKLMiniMaxH3Audio"),
        ):
            model, found = getattr(diffusers, name).from_pretrained(
                os.fspath(path / folder), output_loading_info=True, torch_dtype=torch.float32
            )
            assert not found["missing_keys"]
            assert not found["mismatched_keys"]
            assert all(key.endswith("attn.to_gate_compress.weight") for key in found["unexpected_keys"])
            stored = open_checkpoint(path).weights(folder)
            for key, value in model.state_dict().items():
                assert torch.equal(value, stored.get(key).float()), key

    def test_diffusers_loads_the_schedulers(self, tiny: Path) -> None:
        from diffusers import MiniMaxH3Scheduler

        shifts = {
            name: MiniMaxH3Scheduler.from_pretrained(tiny / name).config.shift
            for name in ("scheduler", "audio_scheduler")
        }
        assert shifts == {"scheduler": 10.0, "audio_scheduler": 3.0}

    def test_transformers_loads_the_text_encoder(self, tiny: Path) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        model, found = Qwen3VLForConditionalGeneration.from_pretrained(
            tiny / "text_encoder", output_loading_info=True, dtype=torch.bfloat16
        )
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
        assert not found["mismatched_keys"]
        rope = model.config.text_config.rope_parameters
        assert (rope["rope_theta"], rope["mrope_section"]) == (5e6, [4, 2, 2])

    def test_transformers_gives_the_same_token_ids(self, tiny: Path) -> None:
        from transformers import AutoTokenizer

        theirs, ours = AutoTokenizer.from_pretrained(tiny / "tokenizer"), load_tokenizer(tiny / "tokenizer")
        for prompt in ("A gull calls.", "<d>[English] Hello.</d> <|cutoff|>", "1234 naïve\r\n\r\n  鯨 <think>"):
            expected = theirs(prompt, add_special_tokens=False).input_ids
            assert ours.encode(prompt, add_special_tokens=False).ids == expected

    def test_decoded_picture_and_sound_are_of_ordinary_strength(self, tiny: Path) -> None:
        from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            vae = AutoencoderKLMiniMaxH3.from_pretrained(os.fspath(tiny / "vae"))
            frames = vae.decode(torch.randn(1, 24, 7, 4, 4, generator=generator)).sample
            audio_vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(os.fspath(tiny / "audio_vae"))
            sound = audio_vae.decode(torch.randn(2, 32, 40, generator=generator)).sample
        # both in the decoders' own units: ImageNet-normalised values, samples in [-1, 1]
        assert 0.3 < frames.std() < 2
        assert frames.std(dim=2).mean() > 0.1
        assert 0.02 < sound.square().mean().sqrt() < 0.3
        assert sound.mean().abs() < 0.01
        assert (sound.abs() == 1).float().mean() < 0.001


def test_components_are_the_ones_that_are_opened(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    assert [bool(checkpoint.weights(name)) for name in COMPONENTS] == [True] * 4
