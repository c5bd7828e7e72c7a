"""From decoded frames to the finished file: how long after the last frame, at what cost, and how good.

    python loadtest/media.py finish --seconds 5 10 15 --rate 100 --pixels rgb24 yuv420p
    python loadtest/media.py presets
    python loadtest/media.py many --clips 500
    python loadtest/media.py many --sizes 256x256 1344x768 --seconds 5 10 --env MALLOC_ARENA_MAX=2 MALLOC_ARENA_MAX=256
    python loadtest/media.py upload

`finish` hands a media process the units of a clip at a rate of frames, as ranks do, or every frame when it is due, and
prints a line of JSON for each clip; of several formats of pixels, each has a process of its own, and they take turns.
`presets` encodes the scenes of `scenes.py` in every preset and compares what comes back with what went in. `many` has
a process make clip after clip, of sizes and lengths in random order, and prints what it holds after each fifth of them;
of several environments, each has a process of its own, and they take turns. `upload` stores the clip of `finish` in a
store on this machine, or the one that `RUSHES_*` names.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import av
import numpy as np
import scenes
from command_line import amount, at_least, canvas, clip_seconds, run
from rushes_cli.main import UsageError
from rushes_core.clip import AUDIO_SAMPLE_RATE, FPS, Clip, units_of
from rushes_core.variants import BY_PRODUCTS
from rushes_worker.media.encode import ClipEncoder
from rushes_worker.media.messages import MadeClip
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.settings import DEFAULT_PRESETS, PRESETS, EncoderSettings, default_encoders
from rushes_worker.media.times import Span, timeline
from rushes_worker.pixels import PixelFormat

_FINISH_SECONDS = 300.0
_COMPARED = 4
"""Every which frame is compared."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    finish = actions.add_parser("finish")
    finish.add_argument("--seconds", type=clip_seconds, nargs="+", default=[10.0])
    finish.add_argument("--rate", type=_rate, default=100.0, help="frames a second; 0: all units at once")
    finish.add_argument("--by", choices=("unit", "frame"), default="unit", help="what is handed over at a time")
    finish.add_argument("--repeat", type=at_least(1), default=5)
    finish.add_argument("--scene", choices=scenes.SCENES, default="drift")
    finish.add_argument("--pixels", nargs="+", choices=list(PixelFormat), default=[PixelFormat.RGB24], type=PixelFormat)
    finish.add_argument("--timeline", action="store_true", help="also when each part of the last clip was at work")
    finish.set_defaults(run=_finish)
    presets = actions.add_parser("presets")
    presets.add_argument("--seconds", type=clip_seconds, default=5.0)
    presets.add_argument("--scenes", nargs="+", choices=scenes.SCENES, default=list(scenes.SCENES))
    presets.add_argument("--presets", nargs="+", choices=PRESETS["libx264"], default=PRESETS["libx264"][:-1])
    presets.add_argument("--crf", type=int, nargs="+", default=[EncoderSettings().crf])
    presets.set_defaults(run=_presets)
    many = actions.add_parser("many")
    many.add_argument("--clips", type=at_least(1), default=500)
    many.add_argument("--sizes", type=_canvas, nargs="+", default=[(480, 480)], metavar="WxH")
    many.add_argument("--seconds", type=clip_seconds, nargs="+", default=[4.0])
    many.add_argument("--encoders", type=at_least(1), default=2, help="segments at once (default 2)")
    many.add_argument(
        "--env",
        type=_variables,
        nargs="+",
        default=[{}],
        metavar="NAME=VALUE",
        help="with commas for several variables",
    )
    many.set_defaults(run=_many)
    upload = actions.add_parser("upload")
    upload.add_argument("--seconds", type=clip_seconds, default=10.0)
    upload.add_argument("--repeat", type=at_least(1), default=5)
    upload.set_defaults(run=_upload)
    for action in (finish, presets):
        default = default_encoders()
        action.add_argument("--encoders", type=int, default=default, help=f"segments at once (default {default})")
        action.add_argument("--keyframe-interval", type=int, nargs="+", default=[EncoderSettings().keyframe_interval])
        action.add_argument("--threads", type=int, default=EncoderSettings().threads)
    finish.add_argument("--preset", default=DEFAULT_PRESETS["libx264"])
    arguments = parser.parse_args()
    arguments.run(arguments)


def _rate(text: str) -> float:
    return 0.0 if text == "0" else amount(text)


def _canvas(text: str) -> tuple[int, int]:
    width, height = canvas(text)
    if width > scenes.WIDTH or height > scenes.HEIGHT:
        raise argparse.ArgumentTypeError(f"a size must be at most {scenes.WIDTH}x{scenes.HEIGHT}, got {text}")
    return width, height


def _variables(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, with commas for several, got {text}")
    return {name: value for name, _, value in pairs}


def _settings(**values: Any) -> EncoderSettings:
    """
    Raises:
        UsageError: there is no such encoder.
    """
    try:
        return EncoderSettings(**values)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _finish(arguments: argparse.Namespace) -> None:
    several = [
        _settings(
            preset=arguments.preset,
            keyframe_interval=interval,
            encoders=arguments.encoders,
            threads=arguments.threads,
        )
        for interval in arguments.keyframe_interval
    ]
    rgb = scenes.SCENES[arguments.scene](Clip.for_seconds(max(arguments.seconds)).num_frames)
    frames = {pixels: rgb if pixels is PixelFormat.RGB24 else _yuv420(rgb) for pixels in arguments.pixels}
    for settings in several:
        for seconds in arguments.seconds:
            count = Clip.for_seconds(seconds).num_frames
            clips = [_Finished(pixels, whole[:count], settings, arguments) for pixels, whole in frames.items()]
            with tempfile.TemporaryDirectory(prefix="rushes-media-") as folder, ExitStack() as processes:
                for clip in clips:
                    processes.enter_context(clip.media)
                # a process that has just started is slower
                for is_counted in (False, *[True] * arguments.repeat):
                    for clip in clips:
                        clip.make(Path(folder), is_counted=is_counted)
                for clip in clips:
                    clip.report()


class _Finished:
    """One clip, made again and again, and how long that took."""

    def __init__(
        self, pixels: PixelFormat, frames: np.ndarray, settings: EncoderSettings, arguments: argparse.Namespace
    ) -> None:
        self.media = MediaProcess(settings)
        self._pixels, self._frames = pixels, frames
        self._settings, self._arguments = settings, arguments
        self._figures: list[tuple[float, float, int]] = []
        self._spans: list[Span] = []

    def make(self, folder: Path, *, is_counted: bool) -> None:
        before = _cpu_seconds(self.media.pid)
        arguments = self._arguments
        handed_over, ended, made = _hand_over(
            self.media, folder, self._frames, arguments.rate, by_frame=arguments.by == "frame"
        )
        # a file in the way of the next clip's would take milliseconds to free
        for path in folder.iterdir():
            path.unlink()
        self._spans = [*made.spans, Span("finished", ended, ended)]
        if is_counted:
            cost = _cpu_seconds(self.media.pid) - before
            self._figures.append((ended - handed_over[-1], cost, made.facts.bytes))

    def report(self) -> None:
        settings, arguments = self._settings, self._arguments
        waits, costs, sizes = zip(*self._figures, strict=True)
        figures = {
            "case": "finish",
            "scene": arguments.scene,
            "pixels": self._pixels,
            "frames": len(self._frames),
            "rate": arguments.rate,
            "by": arguments.by,
            "encoders": settings.encoders,
            "preset": settings.preset,
            "keyframe_interval": settings.keyframe_interval,
            "threads": settings.threads,
            "cores": len(os.sched_getaffinity(0)),
            "after_last_frame_ms": round(median(waits) * 1e3, 1),
            "spread_ms": [round(min(waits) * 1e3, 1), round(max(waits) * 1e3, 1)],
            "cpu_s": round(median(costs), 2),
            "cpu_spread_s": [round(min(costs), 2), round(max(costs), 2)],
            "mebibytes": round(sizes[-1] / 2**20, 2),
            "peak_mib": _status_kib(self.media.pid, "VmHWM") // 1024,
            "load_average": Path("/proc/loadavg").read_text().split()[0],
        }
        print(json.dumps(figures), flush=True)
        if arguments.timeline:
            print(timeline(self._spans), flush=True)


def _hand_over(
    media: MediaProcess, folder: Path, frames: np.ndarray, rate: float, *, by_frame: bool = False
) -> tuple[list[float], float, MadeClip]:
    """When each unit, or each frame, was handed over and when the clip was finished, and the clip."""
    pixels = PixelFormat.RGB24 if frames.ndim == 4 else PixelFormat.YUV420P
    height, width = frames.shape[1:3] if frames.ndim == 4 else (frames.shape[1] * 2 // 3, frames.shape[2])
    names = tuple(variant.name for variant in BY_PRODUCTS)
    sound = folder / "sound.npy"
    np.save(sound, _chord(len(frames)))
    media.start_clip(ClipSpec(folder / "video.mp4", width, height, len(frames), by_products=names))
    media.set_audio(sound)
    units = [range(number, number + 1) for number in range(len(frames))] if by_frame else units_of(len(frames))
    paths = [folder / f"unit-{unit.start:03}.raw" for unit in units]
    if not rate:
        for path, unit in zip(paths, units, strict=True):
            frames[unit.start : unit.stop].tofile(path)
    began, handed_over = time.monotonic(), []
    for number, (path, unit) in enumerate(zip(paths, units, strict=True)):
        if rate:
            frames[unit.start : unit.stop].tofile(path)
            time.sleep(max(0.0, began + unit.stop / rate - time.monotonic()))
        media.add_unit(number, path, len(unit), pixels)
        handed_over.append(time.monotonic())
    made = media.finish(_FINISH_SECONDS)
    return handed_over, time.monotonic(), made


def _yuv420(frames: np.ndarray) -> np.ndarray:
    """[F, 3 H / 2, W] uint8: as a rank on a GPU hands frames over."""
    # nothing else here needs torch
    import torch
    from rushes_kernels.pictures import to_yuv420

    count, height, width, _ = frames.shape
    converted = torch.empty(count, height * 3 // 2, width, dtype=torch.uint8)
    for frame, out in zip(frames, converted, strict=True):
        planes = torch.from_numpy(frame).permute(2, 0, 1).float().contiguous()
        to_yuv420(planes[:, None], (1 / 255,) * 3, (0.0,) * 3, out[None])
    return converted.numpy()


def _many(arguments: argparse.Namespace) -> None:
    whole = scenes.drift(Clip.for_seconds(max(arguments.seconds)).num_frames)
    clips: list[np.ndarray] = []
    for width, height in arguments.sizes:
        frames = np.ascontiguousarray(whole[:, :height, :width])
        clips += [frames[: Clip.for_seconds(seconds).num_frames] for seconds in arguments.seconds]
    order = np.random.default_rng(8).integers(len(clips), size=arguments.clips)
    with tempfile.TemporaryDirectory(prefix="rushes-media-") as folder, ExitStack() as processes:
        several = [_Many(env, arguments.encoders, Path(folder)) for env in arguments.env]
        for one in several:
            processes.enter_context(one.media)
        for number, which in enumerate(order, 1):
            for one in several:
                one.make(clips[which])
            if number % max(1, arguments.clips // 5) == 0 or number == 10:
                # what a clip took is freed after it is told as finished
                time.sleep(1.0)
                for one in several:
                    one.report()


class _Many:
    """A process that makes clip after clip, and what it holds and takes."""

    def __init__(self, env: dict[str, str], encoders: int, folder: Path) -> None:
        self._env, self._folder = env, folder
        before = dict(os.environ)
        os.environ.update(env)
        self.media = MediaProcess(_settings(encoders=encoders))
        os.environ.clear()
        os.environ.update(before)
        self._waits: list[float] = []
        self._cpu = _cpu_seconds(self.media.pid)

    def make(self, frames: np.ndarray) -> None:
        handed_over, ended, _ = _hand_over(self.media, self._folder, frames, 0)
        self._waits.append(ended - handed_over[-1])

    def report(self) -> None:
        pid, cpu = self.media.pid, _cpu_seconds(self.media.pid)
        figures = {
            "case": "many",
            "env": self._env,
            "clips": len(self._waits),
            "rss_mib": round(_status_kib(pid, "VmRSS") / 1024, 1),
            "peak_mib": _status_kib(pid, "VmHWM") // 1024,
            "virtual_mib": _status_kib(pid, "VmSize") // 1024,
            "cpu_s_per_clip": round((cpu - self._cpu) / len(self._waits), 3),
            "s_per_clip": round(sum(self._waits) / len(self._waits), 3),
            "open_files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "load_average": Path("/proc/loadavg").read_text().split()[0],
        }
        print(json.dumps(figures), flush=True)


def _upload(arguments: argparse.Namespace) -> None:
    # the other actions need neither database nor store
    import bench
    from rushes_core.storage import ObjectStore

    frames = scenes.drift(Clip.for_seconds(arguments.seconds).num_frames)
    with tempfile.TemporaryDirectory(prefix="rushes-media-") as folder, bench.servers() as settings:
        path = Path(folder) / "video.mp4"
        _, height, width, _ = frames.shape
        with ClipEncoder(path, width=width, height=height, num_frames=len(frames)) as encoder:
            encoder.add_frames(frames)
            encoder.finish(_chord(len(frames)))
            assert encoder.facts is not None
            sha256 = encoder.facts.sha256
        store, taken = ObjectStore(settings), list[float]()
        for number in range(arguments.repeat + 1):
            key = f"results/load/{os.getpid()}-{number}.mp4"
            began = time.monotonic()
            store.put_file(key, path, content_type="video/mp4", sha256=sha256)
            taken.append((time.monotonic() - began) * 1e3)
            store.delete_keys([key])
        # the first one connects
        bench.report(
            "upload",
            mebibytes=round(path.stat().st_size / 2**20, 2),
            median_ms=round(median(taken[1:]), 1),
            most_ms=round(max(taken[1:]), 1),
            load_average=Path("/proc/loadavg").read_text().split()[0],
        )


def _presets(arguments: argparse.Namespace) -> None:
    several = [
        _settings(
            preset=preset,
            crf=crf,
            keyframe_interval=interval,
            encoders=arguments.encoders,
            threads=arguments.threads,
        )
        for preset, crf, interval in product(arguments.presets, arguments.crf, arguments.keyframe_interval)
    ]
    num_frames = Clip.for_seconds(arguments.seconds).num_frames
    print(
        "| scene | preset | CRF | interval | MB/10 s | CPU s/10 s | PSNR dB | SSIM |\n|---|---|---|---|---|---|---|---|"
    )
    for scene in arguments.scenes:
        frames = scenes.SCENES[scene](num_frames)
        lossless = [_luma(frame) for frame in frames[::_COMPARED]]
        for settings in several:
            size, cpu, psnr, ssim = _encode(frames, lossless, settings)
            share = 10 * FPS / num_frames
            print(
                f"| {scene} | {settings.preset} | {settings.crf} | {settings.keyframe_interval} "
                f"| {size * share / 1e6:.2f} | {cpu * share:.2f} | {psnr:.2f} | {ssim:.4f} |",
                flush=True,
            )


def _encode(
    frames: np.ndarray, lossless: list[np.ndarray], settings: EncoderSettings
) -> tuple[int, float, float, float]:
    """Bytes of the clip, processor seconds, PSNR and SSIM of its luma."""
    _, height, width, _ = frames.shape
    with tempfile.TemporaryDirectory(prefix="rushes-media-") as folder:
        path = Path(folder) / "video.mp4"
        before = time.process_time()
        with ClipEncoder(path, width=width, height=height, num_frames=len(frames), settings=settings) as encoder:
            encoder.add_frames(frames)
            encoder.finish(_chord(len(frames)))
        cpu = time.process_time() - before
        with av.open(str(path)) as container:
            decoded = [_plane(frame) for i, frame in enumerate(container.decode(video=0)) if i % _COMPARED == 0]
        errors = [float(np.square(a - b).mean()) for a, b in zip(decoded, lossless, strict=True)]
        psnr = 10 * np.log10(255**2 / np.mean(errors))
        ssim = np.mean([_ssim(a, b) for a, b in zip(decoded, lossless, strict=True)])
        return path.stat().st_size, cpu, float(psnr), float(ssim)


def _luma(frame: np.ndarray) -> np.ndarray:
    """[H, W] BT.709 limited-range luma of [H, W, 3] RGB, not rounded."""
    return 16 + 219 / 255 * (frame.astype(np.float32) @ np.array([0.2126, 0.7152, 0.0722], np.float32))


def _plane(frame: av.VideoFrame) -> np.ndarray:
    plane = frame.planes[0]
    rows = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
    return rows[:, : plane.width].astype(np.float32)


def _ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity over blocks of 8x8 that overlap by half."""
    mean_a, mean_b = _block_means(a), _block_means(b)
    var_a, var_b = _block_means(a * a) - mean_a**2, _block_means(b * b) - mean_b**2
    covariance = _block_means(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    similarity = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((similarity / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())


def _block_means(values: np.ndarray) -> np.ndarray:
    height, width = values.shape
    quarters = values.astype(np.float64).reshape(height // 4, 4, width // 4, 4).mean((1, 3))
    rows = quarters[:-1] + quarters[1:]
    return (rows[:, :-1] + rows[:, 1:]) / 4


def _chord(num_frames: int) -> np.ndarray:
    """[2, N] float32 as long as the picture."""
    times = np.arange(round(num_frames * AUDIO_SAMPLE_RATE / FPS)) / AUDIO_SAMPLE_RATE
    noise = np.random.default_rng(7).normal(scale=0.02, size=(2, len(times)))
    return (0.2 * np.sin(2 * np.pi * 220 * times) + 0.1 * np.sin(2 * np.pi * 554 * times) + noise).astype(np.float32)


def _cpu_seconds(pid: int) -> float:
    """Of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_kib(pid: int, field: str) -> int:
    """`VmHWM`, the most memory that a process had, mapped frames included, or `VmRSS`, what it has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


if __name__ == "__main__":
    run(main)
