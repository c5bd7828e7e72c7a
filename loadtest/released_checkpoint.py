"""Write a whole checkpoint of the released sizes with random weights, fast, to measure a start from files.

    python loadtest/released_checkpoint.py /dev/shm/released --device cuda
    python loadtest/released_checkpoint.py /tmp/narrow --divide 8

Names, shapes, dtypes and shards are those of the published layout, the values those that `--weights synthetic` draws:
clips can be rendered. What text-to-video never reads (vision tower, VAE encoders, text layers behind the fiftieth) are
holes of the files: 130 GB of 148 are written, and take as much memory or disk. The tokenizer is the tiny checkpoint's.
Ends with status 1 when the directory could not be served.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import local
from typing import Any

import bench
import torch
from command_line import at_least, run
from rushes_core.contract import CONTRACT_FILE
from rushes_worker.checkpoint.configs import VisionConfig
from rushes_worker.checkpoint.directory import examine
from rushes_worker.checkpoint.inventory import CONTENT_FILE
from rushes_worker.checkpoint.manifest import Manifest, TensorSpec
from rushes_worker.checkpoint.random_weights import RandomWeights, Sizes, Source
from rushes_worker.checkpoint.released import AUDIO_VAE, CONTRACT, TEXT_ENCODER, TRANSFORMER, VIDEO_VAE
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint

MODEL_ID = "rushes/written-fasth3-8-step"
VISION = VisionConfig(
    depth=27,
    hidden_size=1152,
    intermediate_size=4304,
    num_heads=16,
    in_channels=3,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    out_hidden_size=5120,
    num_position_embeddings=2304,
    deepstack_visual_indexes=(8, 16, 24),
)
"""Qwen3-VL-32B's."""
MROPE_SECTION = (24, 20, 20)
SHARDS = {"transformer": 14, "text_encoder": 14, "vae": 3, "audio_vae": 1}
CHUNK_BYTES = 64 << 20


RELEASED = Sizes(TRANSFORMER, TEXT_ENCODER, VISION, VIDEO_VAE, AUDIO_VAE)
WIDTHS = {
    "transformer": (
        *("num_attention_heads", "hidden_size", "ffn_dim", "text_dim"),
        *("time_embed_hidden_dim", "time_embed_dim"),
    ),
    "text_encoder": (
        *("vocab_size", "hidden_size", "intermediate_size"),
        *("num_attention_heads", "num_key_value_heads"),
    ),
    "vision": ("hidden_size", "intermediate_size", "num_heads", "out_hidden_size"),
    "video_vae": ("block_out_channels", "norm_num_groups", "decoder_num_attention_heads"),
    "audio_vae": ("encoder_dim", "latent_dim", "num_attention_heads", "decoder_dim"),
}
"""Of every component, what may be divided without another number of layers."""


def divided(sizes: Sizes, by: int) -> Sizes:
    """The same with `WIDTHS` divided, and all layers."""

    def part(width: Any) -> Any:
        return tuple(map(part, width)) if isinstance(width, tuple) else width // by

    components: dict[str, Any] = {}
    for component, widths in WIDTHS.items():
        config = getattr(sizes, component)
        components[component] = replace(config, **{name: part(getattr(config, name)) for name in widths})
    return Sizes(**components)


class Writer:
    """Draws tensors on the source's device and writes them with several threads.

    Args:
        empty: leave every tensor a hole.
    """

    def __init__(self, *, threads: int, on_cuda: bool, empty: bool) -> None:
        self.num_bytes = 0
        self._pool = ThreadPoolExecutor(threads)
        self._on_cuda = on_cuda
        self._empty = empty
        self._own = local()

    def write(self, folder: Path, weights: RandomWeights, *, shards: int) -> None:
        """All tensors, in `shards` files of about equal size, with an index when there are several.

        Raises:
            OSError: there is no room.
        """
        stem = "model" if folder.name == "text_encoder" else "diffusion_pytorch_model"
        weight_map: dict[str, str] = {}
        waiting = []
        for part, names in enumerate(_parts(weights.manifest, shards), start=1):
            name = f"{stem}.safetensors" if shards == 1 else f"{stem}-{part:05}-of-{shards:05}.safetensors"
            offsets = _create(folder / name, {one: weights.manifest[one] for one in names})
            weight_map |= dict.fromkeys(names, name)
            for one in names:
                if weights.manifest[one].used and not self._empty:
                    self.num_bytes += weights.manifest[one].num_bytes
                    waiting.append(self._pool.submit(self._fill, folder / name, offsets[one], weights, one))
        if shards > 1:
            total = sum(spec.num_bytes for spec in weights.manifest.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(folder / f"{stem}.safetensors.index.json", index)
        for future in waiting:
            future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _fill(self, path: Path, offset: int, weights: RandomWeights, name: str) -> None:
        drawn = weights.get(name).flatten().view(torch.uint8)
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for chunk in drawn.split(CHUNK_BYTES):
                staged = self._buffer()[: len(chunk)]
                staged.copy_(chunk)
                data = staged.numpy().data
                while data:
                    written = os.pwrite(descriptor, data, offset)
                    offset, data = offset + written, data[written:]
        finally:
            os.close(descriptor)

    def _buffer(self) -> torch.Tensor:
        """uint8 [CHUNK_BYTES] of this thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._on_cuda)
        return self._own.buffer


def _parts(manifest: Manifest, count: int) -> Iterator[list[str]]:
    """The names of the tensors of each file."""
    total = sum(spec.num_bytes for spec in manifest.values())
    parts: list[list[str]] = [[] for _ in range(count)]
    position = 0
    for name, spec in manifest.items():
        parts[min(position * count // total, count - 1)].append(name)
        position += spec.num_bytes
    yield from parts


def _create(path: Path, manifest: Mapping[str, TensorSpec]) -> dict[str, int]:
    """A file of zeros with the header of these tensors; where each of them lies in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    # what is wider comes first, so that everything lies at a multiple of its width
    for name, spec in sorted(manifest.items(), key=lambda item: item[1].dtype != "F32"):
        end = position + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in manifest}


def write_layout(path: Path, sizes: Sizes) -> dict[str, Any]:
    """Everything but weights, as the tiny checkpoint has it with other sizes; the contract, which is not written yet.

    Raises:
        ValueError: `path` is a file or has other content.
    """
    write_tiny_checkpoint(path)
    for file in (*path.glob("*/*.safetensors"), *path.glob("*/*.safetensors.index.json"), path / CONTENT_FILE):
        file.unlink()
    contract = json.loads((path / CONTRACT_FILE).read_text())
    (path / CONTRACT_FILE).unlink()
    del contract["checkpoint_content_sha256"]
    _write_json(path / "provenance.json", {"base_model": "written://released"})
    for name, config in (("transformer", sizes.transformer), ("vae", sizes.video_vae), ("audio_vae", sizes.audio_vae)):
        file = path / name / "config.json"
        _write_json(file, json.loads(file.read_text()) | asdict(config))
    file = path / "text_encoder" / "config.json"
    text = json.loads(file.read_text())
    text["text_config"] |= asdict(sizes.text_encoder)
    text["text_config"]["rope_scaling"]["mrope_section"] = MROPE_SECTION
    text["vision_config"] |= asdict(sizes.vision)
    _write_json(file, text)
    return contract | {"model_id": MODEL_ID, "vsa_sparsity": CONTRACT.vsa_sparsity}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"no tensor can be made on {text}: {str(error).splitlines()[0]}") from None
    return device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="does not exist, or is empty")
    parser.add_argument("--device", type=_device, default="cpu", help="draws the weights (default cpu)")
    parser.add_argument("--threads", type=at_least(1), default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--divide", type=int, default=1, choices=(1, 2, 4, 8), help="widths and heads by this")
    parser.add_argument("--empty", action="store_true", help="write no values: a file system with holes takes no room")
    arguments = parser.parse_args()
    path, device = arguments.directory, arguments.device
    sizes = divided(RELEASED, arguments.divide)
    began = time.perf_counter()
    try:
        contract = write_layout(path, sizes)
    except ValueError as error:
        parser.error(str(error))
    writer = Writer(threads=arguments.threads, on_cuda=device.type == "cuda", empty=arguments.empty)
    try:
        for name, weights in sizes.weights(Source(arguments.seed, device)).items():
            writer.write(path / name, weights, shards=SHARDS[name])
    finally:
        writer.close()
    _write_json(path / CONTRACT_FILE, contract)
    seconds = time.perf_counter() - began
    apparent = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    bench.report(
        "written",
        bytes=writer.num_bytes,
        file_bytes=apparent,
        seconds=seconds,
        gb_per_second=writer.num_bytes / 1e9 / seconds,
    )
    problems = examine(path).problems
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    run(main)
