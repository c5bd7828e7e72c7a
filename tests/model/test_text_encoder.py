"""Parity of the text encoder with transformers' Qwen3-VL, on small random weights."""

from functools import cache

import pytest
import torch
from rushes_worker.checkpoint.configs import TextEncoderConfig
from rushes_worker.checkpoint.weights import InMemoryWeights
from rushes_worker.model.text_encoder import NUM_LAYERS_USED, TextEncoder
from support.parallel import run_ranks
from support.ranks import encode_text
from support.roughen import rescale, roughen
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

# fp32 through fifty layers with other shapes of the same sums
ATOL = 2e-4

CONFIG = TextEncoderConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=52,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=5_000_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
)


@cache
def reference() -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    text_config = {name: getattr(CONFIG, name) for name in TextEncoderConfig.__dataclass_fields__}
    text_config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text_config.pop("rope_theta"),
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    text_config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision_config = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": CONFIG.hidden_size,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    special = {
        name: 120 + i
        for i, name in enumerate(["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"])
    }
    config = Qwen3VLConfig(text_config=text_config, vision_config=vision_config, tie_word_embeddings=False, **special)
    model = Qwen3VLForConditionalGeneration(config).eval()
    # drawn with a deviation of 0.02, fifty narrow layers would leave the tokens unmixed
    rescale(model.model.language_model, {"_proj.": 8.0, "embed_tokens": 20.0})
    roughen(model)
    return model


def encoder(dtype: torch.dtype = torch.float32) -> TextEncoder:
    return TextEncoder(CONFIG, InMemoryWeights(reference().state_dict()), device="cpu", dtype=dtype)


def prompt(length: int) -> Tensor:
    return torch.randint(0, 120, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, 5, 130])
@torch.inference_mode()
def test_rows_equal_the_hidden_state_after_fifty_layers(length: int) -> None:
    ids = prompt(length)
    output = reference().model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    expected = output.hidden_states[50][0]
    rows = encoder().encode(ids)
    assert rows.shape == (length, CONFIG.hidden_size)
    torch.testing.assert_close(rows, expected, rtol=0, atol=ATOL)
    # the layer before and a final norm are both far away
    assert (expected - output.hidden_states[49][0]).abs().max() > 100 * ATOL
    normed = reference().model.language_model.norm(expected)
    assert (expected - normed).abs().max() > 100 * ATOL


@torch.inference_mode()
def test_a_row_depends_on_earlier_tokens_and_not_on_later_ones() -> None:
    ids = prompt(9)
    changed = ids.clone()
    changed[4] = (changed[4] + 1) % 120
    before, after = encoder().encode(ids), encoder().encode(changed)
    torch.testing.assert_close(after[:4], before[:4], rtol=0, atol=1e-5)
    assert ((after - before).abs().amax(dim=1)[4:] > 100 * ATOL).all()


@torch.inference_mode()
def test_bfloat16_stays_close_to_float32() -> None:
    rows, full = encoder(torch.bfloat16).encode(prompt(20)), encoder().encode(prompt(20))
    assert rows.dtype == torch.bfloat16
    # the residual stream itself is bf16: fifty roundings of 2^-9 relative, amplified by the layers
    assert (rows.float() - full).std() < 0.1 * full.std()


def test_nothing_but_the_embedding_and_fifty_layers_is_read() -> None:
    prefixes = [f"model.language_model.layers.{i}." for i in range(NUM_LAYERS_USED)]
    used = ("model.language_model.embed_tokens.weight", *prefixes)
    wanted = {k: v for k, v in reference().state_dict().items() if k.startswith(used)}

    class Strict(InMemoryWeights):
        def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
            asked.append(name)
            return super().get(name, rows, columns)

    asked: list[str] = []
    TextEncoder(CONFIG, Strict(wanted), device="cpu", dtype=torch.float32)
    assert sorted(asked) == sorted(wanted)


def test_a_model_of_fewer_than_fifty_layers_is_refused() -> None:
    fields = {name: getattr(CONFIG, name) for name in TextEncoderConfig.__dataclass_fields__}
    short = TextEncoderConfig(**{**fields, "num_hidden_layers": 49})
    with pytest.raises(ValueError, match="num_hidden_layers is 49"):
        TextEncoder(short, InMemoryWeights({}), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(("ids", "message"), [([], "at least one token"), ([3, 128], "reach 128"), ([-1], "reach -1")])
def test_unusable_token_ids_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder().encode(torch.tensor(ids, dtype=torch.int64))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_model_and_agree_with_one(size: int) -> None:
    # two groups of heads: of three ranks one has none
    weights = dict(reference().state_dict())
    prompts = [prompt(length) for length in (1, 5, 130)]
    with torch.inference_mode():
        expected = [encoder().encode(ids) for ids in prompts]
    states, read = zip(*run_ranks(encode_text, size, CONFIG, weights, prompts), strict=True)
    for mine in states:
        for rows, single in zip(mine, expected, strict=True):
            torch.testing.assert_close(rows, single, rtol=0, atol=ATOL)
        assert all(torch.equal(a, b) for a, b in zip(mine, states[0], strict=True))
    # every element of a projection is read by one rank, and norms by all
    for name in read[0]:
        total = sum(one[name] for one in read)
        assert total == weights[name].numel() * (1 if "proj" in name or "embed" in name else size), name
