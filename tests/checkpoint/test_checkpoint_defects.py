"""A checkpoint that is incomplete, damaged or of another kind is refused before anything of it is loaded."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from rushes_core.errors import CheckpointError, CheckpointUnreadable
from rushes_worker.checkpoint.directory import MAX_LISTED, examine, open_checkpoint
from rushes_worker.checkpoint.family import recognise
from rushes_worker.checkpoint.weights import FileWeights
from safetensors.torch import load_file, save_file
from support.checkpoints import copy_checkpoint, edit_header, edit_json, edit_tensors, make_unreadable
from support.permissions import unprivileged

STEM = "diffusion_pytorch_model"
FIRST, SECOND = f"transformer/{STEM}-00001-of-00002.safetensors", f"transformer/{STEM}-00002-of-00002.safetensors"
INDEX = f"transformer/{STEM}.safetensors.index.json"
VAE, AUDIO_VAE = f"vae/{STEM}.safetensors", f"audio_vae/{STEM}.safetensors"
TEXT, TEXT_SECOND = "text_encoder/model-00001-of-00002.safetensors", "text_encoder/model-00002-of-00002.safetensors"
GATE = "transformer_blocks.1.attn.to_gate_compress.weight"


@dataclass(frozen=True)
class Defect:
    name: str
    damage: Callable[[Path], object]
    told: tuple[str, ...]


def json_change(file: str, **changes: Any) -> Callable[[Path], object]:
    return lambda path: edit_json(path / file, **changes)


def nested_change(file: str, section: str, **changes: Any) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        value = json.loads((path / file).read_text())[section]
        edit_json(path / file, **{section: value | changes})

    return damage


def tensor_change(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda path: edit_tensors(path / file, change)


def header_change(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda path: edit_header(path / file, change)


def cut(file: str, missing: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / file, (path / file).stat().st_size - missing)


def overwrite(file: str, data: bytes) -> Callable[[Path], object]:
    return lambda path: (path / file).write_bytes(data)


def unlink(file: str) -> Callable[[Path], object]:
    return lambda path: (path / file).unlink()


def drop_from_index_and_shard(name: str) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        edit_tensors(path / "transformer" / weight_map.pop(name), lambda tensors: tensors.pop(name))
        edit_json(path / INDEX, weight_map=weight_map)

    return damage


def duplicate_in_other_shard(path: Path) -> None:
    edit_tensors(
        path / SECOND, lambda tensors: tensors.update({"proj_in.bias": load_file(path / FIRST)["proj_in.bias"]})
    )


def mix_sets(path: Path) -> None:
    """The second shard comes from a set of three."""
    other = f"{STEM}-00002-of-00003.safetensors"
    (path / SECOND).rename(path / "transformer" / other)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    moved = {name: other if file == Path(SECOND).name else file for name, file in weight_map.items()}
    edit_json(path / INDEX, weight_map=moved)


def index_of_three(path: Path) -> None:
    """Two of three shards are there, and the index names only those two."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    names = {file: file.replace("of-00002", "of-00003") for file in weight_map.values()}
    for old, new in names.items():
        (path / "transformer" / old).rename(path / "transformer" / new)
    edit_json(path / INDEX, weight_map={name: names[file] for name, file in weight_map.items()})


def move_token(path: Path) -> None:
    """A letter gets an id behind all others; there are as many tokens as before."""
    model = json.loads((path / "tokenizer/tokenizer.json").read_text())["model"]
    edit_json(path / "tokenizer/tokenizer.json", model=model | {"vocab": model["vocab"] | {"a": 1000}})


def rename_tensor(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


def first(header: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in header.items() if name != "__metadata__")


DEFECTS = [
    # files and shards
    Defect("missing shard", unlink(SECOND), (SECOND, "missing shard", "tensors, among them")),
    Defect("missing file", unlink(VAE), ("/vae: no safetensors file",)),
    Defect("missing index", unlink(INDEX), ("/transformer: several files without an index", "00001-of-00002")),
    Defect("empty shard", overwrite(FIRST, b""), (FIRST, "cut short: 0 bytes")),
    Defect("shard of zeros", overwrite(FIRST, bytes(4096)), (FIRST, "not readable JSON")),
    Defect("cut in the data", cut(SECOND, 100), (SECOND, "cut short: 100 bytes are missing", "is not whole")),
    Defect("cut in the header", lambda p: os.truncate(p / FIRST, 500), (FIRST, "cut short: header of")),
    Defect("cut single file", cut(AUDIO_VAE, 1), (AUDIO_VAE, "cut short: 1 bytes are missing")),
    Defect(
        "trailing bytes", lambda p: (p / VAE).write_bytes((p / VAE).read_bytes() + b"\0" * 7), (VAE, "7 bytes after")
    ),
    Defect("not safetensors", overwrite(VAE, b"PK\3\4" + b"\xff" * 100), (VAE, "not a safetensors file: header of")),
    Defect(
        "LFS pointer", overwrite(VAE, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"), (VAE, "header")
    ),
    Defect(
        "stale extra shard",
        lambda p: shutil.copy(p / FIRST, p / "transformer" / "old.safetensors"),
        ("/transformer/old.safetensors", "not named by", "stale"),
    ),
    Defect(
        "single file beside the shards",
        lambda p: shutil.copy(p / VAE, p / "transformer" / f"{STEM}.safetensors"),
        (f"/transformer/{STEM}.safetensors", "second set of weights"),
    ),
    Defect(
        "two single files",
        lambda p: shutil.copy(p / VAE, p / "vae" / "copy.safetensors"),
        ("/vae: several files without an index", "copy.safetensors"),
    ),
    Defect(
        "two indexes",
        lambda p: shutil.copy(p / INDEX, p / "transformer" / "model.safetensors.index.json"),
        ("/transformer: several indexes", "model.safetensors.index.json"),
    ),
    Defect("two sets mixed", mix_sets, (INDEX, "mixes several sets of shards", "00001-of-00002", "00002-of-00003")),
    Defect("incomplete series", index_of_three, (INDEX, "2 of 3 shards", "00003-of-00003")),
    Defect(
        "pickled weights",
        lambda p: (p / "transformer" / "adaln_tables.pt").touch(),
        ("adaln_tables.pt", "another format"),
    ),
    Defect(
        "unfinished download",
        lambda p: (p / f"{SECOND}.aria2").touch(),
        (f"{SECOND}.aria2: the download of {Path(SECOND).name} was not finished",),
    ),
    Defect("missing component", lambda p: shutil.rmtree(p / "audio_vae"), ("/audio_vae: missing component",)),
    # index
    Defect("index is not JSON", overwrite(INDEX, b"{"), (INDEX, "not readable JSON")),
    Defect("index without map", json_change(INDEX, weight_map=None), (INDEX, "weight_map is missing")),
    Defect(
        "index leaves the folder",
        json_change(INDEX, weight_map={"proj_in.bias": "../vae/x.safetensors"}),
        (INDEX, "'proj_in.bias'", "beside it"),
    ),
    Defect(
        "indexed key not in its shard",
        tensor_change(FIRST, lambda t: t.pop("proj_in.bias")),
        (FIRST, "lacks proj_in.bias", "placed there by"),
    ),
    Defect(
        "key that the index does not name",
        tensor_change(FIRST, lambda t: t.update(spare=torch.zeros(3))),
        (FIRST, "holds spare", "does not name"),
    ),
    Defect("tensor in two shards", duplicate_in_other_shard, (SECOND, "proj_in.bias a second time", "00001-of-00002")),
    # tensors
    Defect(
        "missing tensor",
        drop_from_index_and_shard("proj_out.weight"),
        ("/transformer: missing tensors: proj_out.weight",),
    ),
    Defect("missing gate", drop_from_index_and_shard(GATE), (GATE, "sparse-attention gates")),
    Defect(
        "renamed tensor",
        tensor_change(VAE, rename_tensor("decoder.proj_in.bias", "decoder.proj_in.bais")),
        ("/vae: missing tensors: decoder.proj_in.bias", f"{VAE}: surplus tensors: decoder.proj_in.bais"),
    ),
    Defect(
        "surplus tensor of a used part",
        tensor_change(VAE, lambda t: t.update({"decoder.extra": torch.zeros(2)})),
        (VAE, "surplus tensors: decoder.extra"),
    ),
    Defect(
        "surplus tensor of an unused part",
        tensor_change(AUDIO_VAE, lambda t: t.update({"encoder.extra": torch.zeros(2)})),
        (AUDIO_VAE, "surplus tensors: encoder.extra"),
    ),
    Defect(
        "missing tensor of an unused part",
        tensor_change(AUDIO_VAE, lambda t: t.pop("mean_proj.bias")),
        ("/audio_vae: missing tensors: mean_proj.bias",),
    ),
    Defect(
        "layer too many",
        nested_change("text_encoder/config.json", "text_config", num_hidden_layers=51),
        (TEXT_SECOND, "surplus tensors: model.language_model.layers.51.", "and 3 more"),
    ),
    Defect(
        "layer too few",
        nested_change("text_encoder/config.json", "text_config", num_hidden_layers=53),
        ("/text_encoder: missing tensors: model.language_model.layers.52.",),
    ),
    Defect(
        "wrong shape",
        tensor_change(VAE, lambda t: t.update({"decoder.proj_in.bias": torch.zeros(31)})),
        (VAE, "decoder.proj_in.bias has shape [31], expected [32]"),
    ),
    Defect(
        "transposed weight",
        tensor_change(FIRST, lambda t: t.update({"proj_in.weight": t["proj_in.weight"].T.contiguous()})),
        (FIRST, "proj_in.weight has shape [96, 48], expected [48, 96]"),
    ),
    Defect(
        "float32 group stored as bf16",
        tensor_change(FIRST, lambda t: t.update({"proj_in.weight": t["proj_in.weight"].bfloat16()})),
        (FIRST, "proj_in.weight is BF16, expected F32"),
    ),
    Defect(
        "bf16 weight stored as fp32",
        tensor_change(FIRST, lambda t: t.update({"context_embedder.bias": t["context_embedder.bias"].float()})),
        (FIRST, "context_embedder.bias is F32, expected BF16"),
    ),
    Defect(
        "half precision VAE",
        tensor_change(VAE, lambda t: t.update({k: v.half() for k, v in t.items()})),
        (VAE, "is F16, expected F32", "more tensors of wrong shape or dtype"),
    ),
    # headers
    Defect(
        "offsets outside the file",
        header_change(VAE, lambda h: first(h).update(data_offsets=[1 << 40, (1 << 40) + 4])),
        (VAE, "data_offsets"),
    ),
    Defect(
        "shifted offsets",
        header_change(
            VAE,
            lambda h: [
                e.update(data_offsets=[o + 4 for o in e["data_offsets"]]) for n, e in h.items() if n != "__metadata__"
            ],
        ),
        (VAE, "cut short: 4 bytes are missing"),
    ),
    Defect("overlapping tensors", header_change(VAE, lambda h: h.update(twin=dict(first(h)))), (VAE, "overlaps")),
    Defect(
        "gap between tensors",
        header_change(VAE, lambda h: h.pop("decoder.proj_in.bias")),
        (VAE, "leaves 128 bytes unused"),
    ),
    Defect("unknown dtype", header_change(VAE, lambda h: first(h).update(dtype="Q4")), (VAE, "unknown dtype 'Q4'")),
    Defect("dtype of the wrong type", header_change(VAE, lambda h: first(h).update(dtype={})), (VAE, "unknown dtype")),
    Defect("negative shape", header_change(VAE, lambda h: first(h).update(shape=[-1])), (VAE, "not a list of sizes")),
    Defect(
        "shape and bytes disagree",
        header_change(VAE, lambda h: first(h).update(shape=[5])),
        (VAE, "do not span the 20 bytes"),
    ),
    Defect(
        "entry without offsets",
        header_change(VAE, lambda h: first(h).pop("data_offsets")),
        (VAE, "expected dtype, shape"),
    ),
    Defect("header is a list", overwrite(VAE, (2).to_bytes(8, "little") + b"[]"), (VAE, "expected a JSON object")),
    # configs
    Defect(
        "unknown key",
        json_change("transformer/config.json", attention_window=7),
        ("/transformer/config.json: attention_window is 7, expected no such field",),
    ),
    Defect(
        "rank-reduced modulation",
        json_change("transformer/config.json", adaln_rank=16),
        ("adaln_rank is 16", "not implemented"),
    ),
    Defect(
        "progressive distillation",
        json_change("transformer/config.json", pdd_steps=32),
        ("pdd_steps is 32", "not implemented"),
    ),
    Defect(
        "quantised component",
        json_change("vae/config.json", quantization_config={"quant_algo": "NVFP4"}),
        ("/vae/config.json: quantization_config", "quantised weights are not implemented"),
    ),
    Defect(
        "missing key",
        json_change("transformer/config.json", ffn_dim=None),
        ("/transformer/config.json: ffn_dim is missing",),
    ),
    Defect(
        "wrong type", json_change("transformer/config.json", ffn_dim="96"), ("ffn_dim is '96', expected an integer",)
    ),
    Defect(
        "boolean as number",
        json_change("transformer/config.json", norm_eps=True),
        ("norm_eps is True, expected a number",),
    ),
    Defect("negative size", json_change("vae/config.json", decoder_ffn_mult=-1), ("decoder_ffn_mult is -1",)),
    Defect(
        "absurd depth",
        json_change("transformer/config.json", num_layers=10**9),
        ("num_layers is 1000000000", "1..1000"),
    ),
    Defect(
        "wrong class",
        json_change("transformer/config.json", _class_name="WanTransformer3DModel"),
        ("_class_name is 'WanTransformer3DModel', expected 'MiniMaxH3Transformer3DModel'",),
    ),
    Defect(
        "wrong list length",
        json_change("transformer/config.json", patch_size=[2, 2]),
        ("patch_size is [2, 2], expected a list of 3",),
    ),
    Defect(
        "other patch size",
        json_change("transformer/config.json", patch_size=[1, 4, 4]),
        ("patch_size is [1, 4, 4], expected [1, 2, 2]",),
    ),
    Defect(
        "rotary wider than a head",
        json_change("transformer/config.json", rope_freq_dim=6),
        ("at least 6 * rope_freq_dim = 36",),
    ),
    Defect(
        "statistics of another size",
        json_change("vae/config.json", latents_mean=[0.0]),
        ("latents_mean has 1 entries, expected 24",),
    ),
    Defect(
        "other compression",
        json_change("vae/config.json", spatial_downsample_factors=[2, 2, 2, 1, 1, 1]),
        ("compress by 8, expected 16",),
    ),
    Defect(
        "other level count", json_change("vae/config.json", block_out_channels=[8, 8]), ("has 6 entries, expected 2",)
    ),
    Defect(
        "other sampling rate",
        json_change("audio_vae/config.json", sampling_rate=44100),
        ("sampling_rate is 44100, expected 32000",),
    ),
    Defect(
        "other hop",
        json_change("audio_vae/config.json", decoder_rates=[5, 5, 2, 2, 2, 2, 1]),
        ("decoder_rates multiply to 400, expected 800",),
    ),
    Defect(
        "nested list of text",
        json_change("audio_vae/config.json", resblock_dilation_sizes=[[1, "3"]]),
        ("resblock_dilation_sizes",),
    ),
    Defect("config is not JSON", overwrite("vae/config.json", b"\xff\xfe"), ("/vae/config.json: not readable JSON",)),
    Defect("config missing", unlink("audio_vae/config.json"), ("/audio_vae/config.json: missing",)),
    Defect(
        "unknown key of the text encoder",
        nested_change("text_encoder/config.json", "text_config", sliding_window=4096),
        ("/text_encoder/config.json: text_config.sliding_window is 4096, expected no such field",),
    ),
    Defect(
        "quantised text encoder",
        json_change("text_encoder/config.json", quantization_config={"quant_method": "fp8"}),
        ("/text_encoder/config.json: quantization_config", "not implemented"),
    ),
    Defect(
        "other activation",
        nested_change("text_encoder/config.json", "text_config", hidden_act="gelu"),
        ("text_config.hidden_act is 'gelu'",),
    ),
    Defect(
        "attention with bias",
        nested_change("text_encoder/config.json", "text_config", attention_bias=True),
        ("text_config.attention_bias is True",),
    ),
    Defect(
        "scaled rope",
        nested_change("text_encoder/config.json", "text_config", rope_scaling={"rope_type": "yarn"}),
        ("text_config.rope_scaling.rope_type is 'yarn'",),
    ),
    Defect(
        "two rope bases",
        nested_change(
            "text_encoder/config.json", "text_config", rope_scaling={"rope_type": "default", "rope_theta": 1e4}
        ),
        ("text_config.rope_theta", "10000.0, as rope_scaling says"),
    ),
    Defect(
        "too shallow a text encoder",
        nested_change("text_encoder/config.json", "text_config", num_hidden_layers=49),
        ("num_hidden_layers is 49, expected at least 50",),
    ),
    Defect(
        "other text model",
        json_change("text_encoder/config.json", model_type="qwen2_5_vl"),
        ("model_type is 'qwen2_5_vl', expected 'qwen3_vl'",),
    ),
    # agreement between files
    Defect(
        "other text width",
        json_change("transformer/config.json", text_dim=40),
        ("text_dim is 40, expected 32, the hidden_size of text_encoder",),
    ),
    Defect(
        "other latent channels",
        json_change("transformer/config.json", in_channels=16),
        ("in_channels is 16, expected 24, the latent_channels of vae",),
    ),
    Defect(
        "contract against scheduler",
        json_change("fastvideo_inference.json", video_scheduler_shift=12.0),
        ("video_scheduler_shift is 12.0, expected 10.0",),
    ),
    Defect(
        "contract of another export",
        json_change("fastvideo_inference.json", checkpoint_content_sha256="0" * 64),
        ("/checkpoint_content.json: aggregate_sha256", "different exports"),
    ),
    Defect(
        "index of another model",
        json_change("modular_model_index.json", _class_name="WanPipeline"),
        ("/modular_model_index.json: _class_name is 'WanPipeline'",),
    ),
    # tokenizer
    Defect("no tokenizer", lambda p: shutil.rmtree(p / "tokenizer"), ("/tokenizer/tokenizer.json: missing",)),
    Defect(
        "plain Qwen tokenizer",
        json_change("tokenizer/tokenizer_config.json", additional_special_tokens=["<|im_start|>"]),
        ("/tokenizer/tokenizer_config.json: additional_special_tokens lacks '<d>'",),
    ),
    Defect(
        "extra tokens in another order",
        json_change(
            "tokenizer/tokenizer_config.json",
            additional_special_tokens=[
                "</d>",
                "<d>",
                "<|cutoff|>",
                "<|lyrics_start|>",
                "<|lyrics_end|>",
                "<|caption_start|>",
                "<|caption_end|>",
            ],
        ),
        ("token '<d>' has id 283, expected 282",),
    ),
    Defect(
        "unreadable tokenizer",
        overwrite("tokenizer/tokenizer.json", b"{}"),
        ("/tokenizer/tokenizer.json: not a readable tokenizer",),
    ),
    Defect(
        "more tokens than embeddings",
        nested_change("text_encoder/config.json", "text_config", vocab_size=280),
        (
            "/tokenizer: the last token has id 288, expected one below the 280",
            "embed_tokens.weight has shape [320, 32], expected [280, 32]",
        ),
    ),
    Defect("token without an embedding", move_token, ("/tokenizer: the last token has id 1000, expected one below",)),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "-"))
def test_defect_is_refused_with_its_place_named(defect: Defect, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.damage(damaged)
    monkeypatch.setattr(FileWeights, "get", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(damaged)
    message = str(raised.value)
    assert str(damaged) in message
    for text in defect.told:
        assert text in message


def test_all_defects_are_told_at_once(damaged: Path) -> None:
    (damaged / SECOND).unlink()
    os.truncate(damaged / VAE, 1000)
    edit_json(damaged / "audio_vae/config.json", sampling_rate=8000)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(damaged)
    assert all(text in str(raised.value) for text in (SECOND, VAE, "sampling_rate", "3 problems"))


def test_the_message_stays_bounded(damaged: Path) -> None:
    for number in range(100):
        save_file({"a": torch.zeros(1)}, damaged / "transformer" / f"stale-{number:03}.safetensors")
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(damaged)
    lines = str(raised.value).splitlines()
    assert len(lines) == MAX_LISTED + 2
    assert lines[-1].strip() == f"and {100 - MAX_LISTED} more"


@pytest.mark.parametrize(
    "name", ["vae", "modular_model_index.json", "fastvideo_inference.json", "checkpoint_content.json"]
)
def test_link_to_where_nobody_may_look_is_named(tiny: Path, name: str) -> None:
    with TemporaryDirectory() as folder:
        copy, elsewhere = copy_checkpoint(tiny, Path(folder, "copy")), Path(folder, "elsewhere")
        Path(folder).chmod(0o755)
        elsewhere.mkdir()
        (copy / name).rename(elsewhere / name)
        (copy / name).symlink_to(elsewhere / name)
        elsewhere.chmod(0o600)
        with unprivileged(), pytest.raises(CheckpointError, match=f"{copy / name}: Permission denied"):
            open_checkpoint(copy)


@pytest.mark.parametrize(
    "name",
    [
        "fastvideo_inference.json",
        "audio_scheduler/scheduler_config.json",
        "modular_model_index.json",
        "transformer/config.json",
        "checkpoint_content.json",
        "tokenizer/tokenizer.json",
        INDEX,
        SECOND,
    ],
)
def test_file_system_that_fails_is_told_apart_from_a_defect(damaged: Path, name: str) -> None:
    make_unreadable(damaged / name)
    with pytest.raises(CheckpointUnreadable, match=f"^{damaged / name}: Input/output error$"):
        open_checkpoint(damaged)
    assert f"{damaged / name}: Input/output error" in examine(damaged).problems
    assert recognise(damaged)


def test_base_model_is_told_from_a_student(damaged: Path) -> None:
    (damaged / "fastvideo_inference.json").unlink()
    for layer in range(2):
        drop_from_index_and_shard(f"transformer_blocks.{layer}.attn.to_gate_compress.weight")(damaged)
    with pytest.raises(CheckpointError, match="base MiniMax-H3 checkpoint"):
        open_checkpoint(damaged)


def test_component_of_the_base_revision_is_asked_for_by_name(damaged: Path) -> None:
    edit_json(damaged / "fastvideo_inference.json", base_model_revision="hf://MiniMaxAI/MiniMax-H3@abc")
    shutil.rmtree(damaged / "vae")
    with pytest.raises(CheckpointError, match=r"/vae: missing component; .*hf://MiniMaxAI/MiniMax-H3@abc"):
        open_checkpoint(damaged)
