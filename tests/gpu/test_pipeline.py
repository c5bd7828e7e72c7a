from pathlib import Path

import numpy as np
import pytest
import torch
from rushes_kernels.scaled_linear import E4M3
from rushes_worker.checkpoint.directory import Checkpoint, open_checkpoint
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.model.sequence import PackedSequence
from rushes_worker.model.transformer import Transformer
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pipeline.schedule import Schedule
from rushes_worker.pixels import PixelFormat
from support.media import yuv420
from support.parallel import run_ranks
from support.ranks import denoise, exercise_collectives
from support.rendering import RecordingReporter, render_on_rank, render_whole, request
from support.tiny_model import Clip, random_weights, tiny_config
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module", params=["dense", "wide"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / request.param
    write_tiny_checkpoint(path, profile=request.param)
    return path


@torch.inference_mode()
def one_forward(
    checkpoint: Checkpoint, device: str, dtype: torch.dtype, feed_forward: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Audio and video velocity of a small clip, attended densely: a flipped selection is no rounding."""
    config = checkpoint.transformer_config
    transformer = Transformer(
        config,
        checkpoint.weights("transformer"),
        schedule=Schedule.from_contract(checkpoint.contract),
        sparsity=0.0,
        device=device,
        dtype=dtype,
        parallel=SequenceParallel.single(device),
        feed_forward=feed_forward,
    )
    clip = Clip(33, 70, 9, 18, 14)
    sequence = PackedSequence.build(config, **clip.shape, device=device)
    audio, video = (rows.to(device) for rows in clip.latent_rows(config))
    text_rows = transformer.refine(clip.text_embeds(config).to(device))
    audio_velocity, video_velocity = transformer.forward(3, text_rows, audio, video, sequence)
    return audio_velocity.cpu(), video_velocity.cpu()


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
def test_one_forward_agrees_with_the_cpu(checkpoint: Path, dtype: torch.dtype, share: float) -> None:
    opened = open_checkpoint(checkpoint)
    expected = one_forward(opened, "cpu", torch.float32)
    for mine, theirs in zip(one_forward(opened, "cuda", dtype), expected, strict=True):
        assert mine.dtype == torch.float32
        # bf16 rounds every activation to 8 bits: its error is about a hundredth of the largest value
        assert (mine - theirs).abs().amax() < share * theirs.abs().amax()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)
def test_one_forward_in_8_bits_agrees_with_the_cpu(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    expected = one_forward(opened, "cpu", torch.float32, E4M3)
    for mine, theirs in zip(one_forward(opened, "cuda", torch.bfloat16, E4M3), expected, strict=True):
        # bf16 beside e4m3 on the CPU: 0.019 to 0.028, most of it roundings to e4m3 that bf16's errors turn
        assert (mine - theirs).norm() < 0.04 * theirs.norm()


def test_renders_a_clip(checkpoint: Path) -> None:
    pipeline = FastH3Pipeline(checkpoint, device="cuda:0")
    first, again = RecordingReporter(), RecordingReporter()
    for reporter in (first, again):
        render_whole(pipeline, request(width=384, height=320), reporter)
    # what the encoder takes: 320 rows of Y, then U and V at half the size
    assert first.pixels is PixelFormat.YUV420P
    assert first.clip.shape == (107, 320 * 3 // 2, 384)
    assert first.clip[:, :320].std() > 10
    assert first.samples is not None
    assert first.samples.shape == (2, 142_667)
    assert 0.01 < first.samples.std() < 1
    assert np.array_equal(first.clip, again.clip)


def test_frames_are_those_of_rgb_in_another_form(checkpoint: Path) -> None:
    one = request(width=384, height=320)
    rgb, yuv = (
        render_on_rank(SequenceParallel.single("cuda:0"), checkpoint, [one], [f"pixels={pixels}"])[0]
        for pixels in PixelFormat
    )
    assert rgb.clip.shape == (107, 320, 384, 3)
    # rounding to RGB moves luma by half a level of it, and by another half when that is rounded
    assert np.abs(yuv.clip.astype(int) - yuv420(rgb.clip)).max() <= 1


@pytest.mark.multigpu
@two_devices
def test_collectives_of_two_devices() -> None:
    for rank, seen in enumerate(run_ranks(exercise_collectives, 2, 7, device="cuda")):
        assert torch.equal(seen["gathered"], seen["whole"])
        assert all(torch.equal(traded, seen["expected_trade"]) for traded in seen["traded"])
        assert torch.equal(seen["landed"], seen["whole"])
        assert seen["added_up"].tolist() == [1.0] * 4
        assert seen["passed_on"].tolist() == [1 - rank] * 4
        assert seen["any"] == [False, True]


@pytest.mark.multigpu
@two_devices
def test_two_devices_denoise_what_one_does() -> None:
    clips = [Clip(1, 2, 6, 10, 14), Clip(63, 33, 9, 14, 6)]
    tensors = random_weights(tiny_config())
    with torch.inference_mode():
        expected, _ = denoise(SequenceParallel.single("cuda:0"), tensors, clips, 0.5, 3)
    for latents, _ in run_ranks(denoise, 2, tensors, clips, 0.5, 3, device="cuda"):
        for mine, single in zip(latents, expected, strict=True):
            for a, b in zip(mine, single, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.multigpu
@two_devices
def test_two_devices_render_a_whole_clip(checkpoint: Path) -> None:
    first, last = run_ranks(render_on_rank, 2, checkpoint, [request(num_frames=124)], device="cuda")
    assert sorted(first[0].units | last[0].units) == list(range(7))
    assert last[0].samples is not None
