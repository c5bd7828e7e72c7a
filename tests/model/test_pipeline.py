from pathlib import Path

import numpy as np
import pytest
import torch
from rushes_core.errors import CheckpointError, InvalidOutput, InvalidRequest
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import Cancelled, RenderRequest
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pixels import PixelFormat
from support.media import yuv420
from support.oracle import diffusers_clip
from support.parallel import run_ranks
from support.rendering import RecordingReporter, fail_on_rank, render_on_rank, render_whole, request


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "demo"
    write_tiny_checkpoint(path, profile="demo")
    return path


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> FastH3Pipeline:
    return FastH3Pipeline(checkpoint)


def render(pipeline: FastH3Pipeline, one: RenderRequest) -> RecordingReporter:
    reporter = RecordingReporter()
    render_whole(pipeline, one, reporter)
    return reporter


class TestRender:
    def test_clip_has_the_frames_and_samples_that_were_asked_for(self, pipeline: FastH3Pipeline) -> None:
        seen = render(pipeline, request())
        assert {unit: len(frames) for unit, frames in seen.units.items()} == {0: 17, 1: 17, 2: 17, 3: 17, 4: 17, 5: 22}
        assert seen.clip.shape == (107, 96, 64, 3)
        assert seen.clip.dtype == np.uint8
        assert seen.clip.std() > 10
        assert seen.samples is not None
        assert seen.samples.shape == (2, 142_667)
        assert seen.samples.dtype == np.float32
        assert 0.01 < seen.samples.std() < 1
        assert np.abs(seen.samples).max() <= 1

    @pytest.mark.parametrize(("frames", "samples"), [(107, 142_667), (124, 165_333), (192, 256_000)])
    def test_soundtrack_lasts_as_long_as_the_picture(self, pipeline: FastH3Pipeline, frames: int, samples: int) -> None:
        seen = render(pipeline, request(width=32, height=32, num_frames=frames))
        assert len(seen.clip) == frames
        assert seen.samples is not None
        assert seen.samples.shape == (2, samples)

    def test_phases_and_steps_are_reported_in_order(self, pipeline: FastH3Pipeline) -> None:
        seen = render(pipeline, request(width=32, height=32))
        steps = [("denoising", step) for step in range(9)]
        assert seen.phases == [("encoding", 0), *steps, ("decoding", 0)]
        assert seen.boundaries == 1 + 8 + 6

    def test_seed_and_prompt_decide_the_clip(self, pipeline: FastH3Pipeline) -> None:
        first, again = (render(pipeline, request()) for _ in range(2))
        assert np.array_equal(first.clip, again.clip)
        assert np.array_equal(first.samples, again.samples)
        for other in (request(seed=43), request(prompt="a robot dancing in the raid")):
            assert not np.array_equal(render(pipeline, other).clip, first.clip)

    def test_in_8_bits_a_clip_is_nearly_the_same(self, pipeline: FastH3Pipeline, checkpoint: Path) -> None:
        in_8_bits = FastH3Pipeline(checkpoint, options=["precision=fp8"])
        assert "feed-forward layers float8_e4m3fn" in in_8_bits.precision
        apart = np.abs(render(in_8_bits, request()).clip.astype(int) - render(pipeline, request()).clip)
        assert 0 < apart.mean() < 3

    @pytest.mark.parametrize("boundary", [0, 3, 10])
    def test_cancelled_render_leaves_the_pipeline_usable(self, pipeline: FastH3Pipeline, boundary: int) -> None:
        reporter = RecordingReporter(cancel_at=boundary)
        with pytest.raises(Cancelled):
            render_whole(pipeline, request(), reporter)
        assert len(reporter.units) < 6
        assert len(render(pipeline, request()).clip) == 107


class TestPixels:
    def test_are_rgb_on_the_cpu_and_420_where_that_is_asked_for(
        self, pipeline: FastH3Pipeline, checkpoint: Path
    ) -> None:
        one = request(num_frames=107)
        rgb = render(pipeline, one)
        assert rgb.pixels is PixelFormat.RGB24
        seen = render(FastH3Pipeline(checkpoint, options=["pixels=yuv420p"]), one)
        assert seen.pixels is PixelFormat.YUV420P
        assert {unit: len(frames) for unit, frames in seen.units.items()} == {0: 17, 1: 17, 2: 17, 3: 17, 4: 17, 5: 22}
        assert seen.clip.shape == (107, 96 * 3 // 2, 64)
        # rounding to RGB moves luma by half a level of it, and by another half when that is rounded
        assert np.abs(seen.clip.astype(int) - yuv420(rgb.clip)).max() <= 1
        assert np.array_equal(seen.samples, rgb.samples)

    def test_of_two_ranks_are_those_of_one(self, checkpoint: Path) -> None:
        options = ["pixels=yuv420p"]
        (single,) = render_on_rank(SequenceParallel.single(), checkpoint, [request()], options)
        (first,), (last,) = run_ranks(render_on_rank, 2, checkpoint, [request()], options)
        assert {first.pixels, last.pixels} == {PixelFormat.YUV420P}
        units = first.units | last.units
        clip = np.concatenate([units[unit] for unit in sorted(units)])
        assert np.abs(clip.astype(int) - single.clip).max() <= 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("one", "param"),
        [
            (request(num_frames=106), "seconds"),
            (request(width=48), "size"),
            (request(height=0), "size"),
            (request(prompt="<|im_start|>"), "prompt"),
            (request(prompt=""), "prompt"),
        ],
    )
    def test_what_the_request_caused_names_its_field(
        self, pipeline: FastH3Pipeline, one: RenderRequest, param: str
    ) -> None:
        with pytest.raises(InvalidRequest) as caught:
            render(pipeline, one)
        assert caught.value.param == param

    def test_unknown_option(self, checkpoint: Path) -> None:
        with pytest.raises(ValueError, match="fast-please"):
            FastH3Pipeline(checkpoint, options=["fast-please"])

    def test_provider_of_attention_that_cannot_serve(self, checkpoint: Path) -> None:
        with pytest.raises(ValueError, match="provider hopper cannot serve: it needs a CUDA device, got cpu"):
            FastH3Pipeline(checkpoint, options=["attention=hopper"])

    def test_missing_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere"):
            FastH3Pipeline(tmp_path / "nowhere")


class TestNotFinite:
    def broken(self, checkpoint: Path, component: str) -> FastH3Pipeline:
        pipeline = FastH3Pipeline(checkpoint)
        if component == "latents":
            pipeline._transformer._norm_out.fill_(torch.nan)
        elif component == "frames":
            pipeline._video_vae._std.fill_(torch.inf)
        else:
            assert pipeline._audio_vae is not None
            pipeline._audio_vae._mean.fill_(torch.nan)
        return pipeline

    @pytest.mark.parametrize(
        ("component", "stage"), [("latents", "denoising"), ("frames", "decoding"), ("samples", "decoding")]
    )
    def test_never_becomes_a_clip(self, checkpoint: Path, component: str, stage: str) -> None:
        reporter = RecordingReporter()
        with pytest.raises(InvalidOutput, match="not finite") as caught:
            render_whole(self.broken(checkpoint, component), request(), reporter)
        assert caught.value.stage == stage
        assert not reporter.units
        assert (reporter.samples is not None) == (component == "frames")


@pytest.fixture(scope="module")
def split_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "split"
    write_tiny_checkpoint(path, profile="split")
    return path


SPLIT_REQUESTS = [
    request(prompt="x", width=32, height=32),
    request(prompt="a robot dancing in the rain " * 4 + "with a red umbrella"),
]


@pytest.fixture(scope="module")
def alone(split_checkpoint: Path) -> list[RecordingReporter]:
    """What one rank makes of `SPLIT_REQUESTS`."""
    return render_on_rank(SequenceParallel.single(), split_checkpoint, SPLIT_REQUESTS)


class TestRanks:
    def test_two_ranks_render_what_one_renders(self, pipeline: FastH3Pipeline, checkpoint: Path) -> None:
        # six units divide evenly, seven leave the last rank idle in the last round
        requests = [request(), request(prompt="x", width=96, height=64, num_frames=124)]
        first, last = run_ranks(render_on_rank, 2, checkpoint, requests)
        for one, a, b in zip(requests, first, last, strict=True):
            single = render(pipeline, one)
            assert sorted(a.units) == list(range(0, len(single.units), 2))
            assert sorted(b.units) == list(range(1, len(single.units), 2))
            whole = np.concatenate([(a.units | b.units)[unit] for unit in range(len(single.units))])
            # latents that agree to 1e-4 may round to neighbouring steps
            assert np.abs(whole.astype(int) - single.clip).max() <= 1
            assert (whole != single.clip).mean() < 1e-2
            assert a.samples is None
            np.testing.assert_allclose(b.samples, single.samples, atol=1e-3)
            assert (a.phases, b.phases) == (single.phases, single.phases)
            assert a.boundaries == b.boundaries

    @pytest.mark.parametrize("size", [4, 7, 8])
    def test_every_served_number_of_ranks_renders_what_one_renders(
        self, split_checkpoint: Path, alone: list[RecordingReporter], size: int
    ) -> None:
        # six units: more ranks than units for seven and eight
        first = 0 if size == 8 else 1
        ranks = run_ranks(render_on_rank, size, split_checkpoint, SPLIT_REQUESTS[first:])
        for index, single in enumerate(alone[first:]):
            seen = [reporters[index] for reporters in ranks]
            for rank, one in enumerate(seen):
                assert sorted(one.units) == list(range(rank, 6, size))
                assert (one.samples is not None) == (rank == size - 1)
            whole = np.concatenate([seen[unit % size].units[unit] for unit in range(6)])
            # latents that agree to 1e-4 may round to neighbouring steps
            assert np.abs(whole.astype(int) - single.clip).max() <= 1
            assert (whole != single.clip).mean() < 1e-2
            np.testing.assert_allclose(seen[-1].samples, single.samples, atol=1e-4)

    def test_a_fault_of_one_rank_is_raised_by_all(self, checkpoint: Path) -> None:
        errors = run_ranks(fail_on_rank, 2, checkpoint, 1)
        frames, samples = (f"NotFinite: decoded {what} are not finite" for what in ("frames", "samples"))
        assert errors == [[frames, samples]] * 2

    def test_a_fault_of_what_is_decoded_last_is_raised_by_its_rank_alone(self, split_checkpoint: Path) -> None:
        # six units: the last of four ranks has none in the second round, and decodes the sound
        errors = run_ranks(fail_on_rank, 4, split_checkpoint, 3)
        frames, last = (f"NotFinite: decoded {what} are not finite" for what in ("frames", "frames or samples"))
        assert errors == [[frames]] * 3 + [[frames, last]]

    def test_ranks_that_do_not_divide_the_heads_are_refused(self, checkpoint: Path) -> None:
        with pytest.raises(Exception, match="2 attention heads cannot be split over 3 ranks"):
            run_ranks(render_on_rank, 3, checkpoint, [])


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_dense_student_renders_the_clip_that_diffusers_renders(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "dense", profile="dense")
    one = request(num_frames=124)
    seen = render(FastH3Pipeline(tmp_path / "dense"), one)
    pixels, samples = diffusers_clip(tmp_path / "dense", one)
    assert pixels.shape == seen.clip.shape
    assert np.abs(pixels.astype(int) - seen.clip).max() <= 1
    assert seen.samples is not None
    num_samples = min(samples.shape[1], seen.samples.shape[1])
    np.testing.assert_allclose(seen.samples[:, :num_samples], samples[:, :num_samples], atol=1e-3)
