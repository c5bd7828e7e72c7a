"""A pipeline without a model: deterministic frames and sound, and faults that the prompt asks for.

Directives stand in brackets anywhere in the prompt; each may end in `on attempt N` and is ignored on other attempts:

    [step 0.2]                 every denoise step takes 0.2 s
    [sleep 2]                  encoding takes 2 s in one piece
    [unit 0.2]                 every round of decoded units takes 0.2 s
    [tail 0.2]                 the last round is done 0.2 s after all work was queued, and the next render may begin
    [die rank 1 at step 3]     that rank kills itself before that step
    [hang at step 3]           every rank sleeps for good
    [invalid] [value error] [generation error] [raise]    what is raised, by every rank, after the first step
    [raise rank 1]             a bug on one rank only
    [out of memory at step 3]  no device memory left; also [out of memory encoding] and [out of memory decoding]
    [late]                     with a tail: the last frames turn out to be bad
    [large]                    the same while decoding, unless the request is for the plan that needs less memory
    [nan]                      the sound is not finite
    [blank]                    one flat colour and silence
    [missing unit]             the last unit is never handed over
    [odd phase]                a phase is entered that there is not
    [odd words]                a generation error with characters that Postgres takes none of

`SCRIPTED_LOAD_SECONDS` and `SCRIPTED_LOAD_ERROR` in the environment slow loading down and make it fail, with an error
of the class `SCRIPTED_LOAD_ERROR_OF`, and only while there is a file `SCRIPTED_LOAD_ERROR_WHILE`, if those are set.
Where `SCRIPTED_LOAD_LIMIT` names a file, loading goes no further than the percentage that is in it, and where
`SCRIPTED_CAPTURE_HOLD` does, what comes after loading goes on as long as that is there.
"""

import os
import re
import signal
import time
from importlib import import_module
from pathlib import Path

import numpy as np
from rushes_core.clip import AUDIO_SAMPLE_RATE, FPS, Clip
from rushes_core.errors import CheckpointError, GenerationError, InvalidRequest, NotFinite, OutOfMemory
from rushes_worker.pipeline.base import LoadWatch, Remainder, RenderRequest, Reporter

NUM_STEPS = 8
_UNIT_FRAMES = 17
_DIRECTIVE = re.compile(r"\[([a-z ]+?)((?: [0-9.]+)?)((?: rank \d+)?)((?: at step \d+)?)((?: on attempt \d+)?)\]")


class ScriptedPipeline:
    """Implements `pipeline.base.PipelineFactory` and `Pipeline`."""

    precision = "no model"

    def __init__(self, checkpoint: Path, *, rank: int, sp: int, watch: LoadWatch, **given: object) -> None:
        self._rank = rank
        self._sp = sp
        with watch.stage("loading weights"):
            _load(watch, float(os.environ.get("SCRIPTED_LOAD_SECONDS", "0")))
        with watch.stage("capturing"):
            hold = os.environ.get("SCRIPTED_CAPTURE_HOLD")
            while hold is not None and Path(hold).exists():
                time.sleep(0.05)
        _fail(checkpoint)

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        script = _Script(request, self._rank)
        clip = Clip(request.num_frames)
        reporter.progress("encoding")
        time.sleep(script.seconds("sleep"))
        if script.has("out of memory encoding"):
            raise OutOfMemory("no memory left")
        for step in range(1, NUM_STEPS + 1):
            reporter.checkpoint()
            script.meet_fate(step)
            time.sleep(script.seconds("step"))
            reporter.progress("denoising", step)
        reporter.progress("no such phase" if script.has("odd phase") else "decoding")
        if script.has("out of memory decoding") or (script.has("large") and not request.low_memory):
            raise OutOfMemory("no memory left")
        if self._rank == 0:
            reporter.audio(_sound(request, clip, script))
        return self._decode(request, reporter, script, clip.num_units)

    def _decode(self, request: RenderRequest, reporter: Reporter, script: "_Script", num_units: int) -> "_Tail | None":
        """Deal the units out to the ranks in rounds, with a boundary before each round; those of the last may come
        late."""
        tail: _Tail | None = None
        for start in range(0, num_units, self._sp):
            reporter.checkpoint()
            time.sleep(script.seconds("unit"))
            unit = start + self._rank
            last = num_units - 1
            if unit <= last and not (unit == last and script.has("missing unit")):
                first = unit * _UNIT_FRAMES
                end = request.num_frames if unit == last else first + _UNIT_FRAMES
                values = frames(request, first, end, flat=script.has("blank"))
                if script.has("tail") and start + self._sp >= num_units:
                    tail = _Tail(reporter, unit, values, script)
                else:
                    reporter.frames(unit, values)
        return tail or (_Tail(reporter, None, None, script) if script.has("tail") else None)


class _Tail:
    """The last unit of a rank, or nothing, which a device is done with only later; implements `Remainder`."""

    def __init__(self, reporter: Reporter, unit: int | None, values: np.ndarray | None, script: "_Script") -> None:
        self._reporter = reporter
        self._unit = unit
        self._values = values
        self._is_bad = script.has("late")
        self._ends_at = time.monotonic() + script.seconds("tail")

    @property
    def is_done(self) -> bool:
        return time.monotonic() >= self._ends_at

    def hand_over(self) -> None:
        time.sleep(max(0.0, self._ends_at - time.monotonic()))
        if self._is_bad:
            raise NotFinite("decoded frames are not finite", stage="decoding")
        if self._unit is not None and self._values is not None:
            self._reporter.frames(self._unit, self._values)


def _fail(checkpoint: Path) -> None:
    """Raise what the environment asks for."""
    message, module_and_name = os.environ.get("SCRIPTED_LOAD_ERROR"), os.environ.get("SCRIPTED_LOAD_ERROR_OF")
    condition = os.environ.get("SCRIPTED_LOAD_ERROR_WHILE")
    if message is None or (condition is not None and not Path(condition).exists()):
        return
    if module_and_name is None:
        raise CheckpointError(f"{checkpoint}: {message}")
    module, name = module_and_name.split(":")
    raise getattr(import_module(module), name)(message)


def _load(watch: LoadWatch, seconds: float) -> None:
    """Take `seconds` for ten pieces of ten bytes."""
    limit = os.environ.get("SCRIPTED_LOAD_LIMIT")
    watch.expect(100)
    for done in range(0, 100, 10):
        while limit is not None and done >= int(Path(limit).read_text()):
            time.sleep(0.05)
            watch.add(0, 0)
        time.sleep(seconds / 10)
        watch.add(10, 10)


def frames(request: RenderRequest, first: int, end: int, *, flat: bool = False) -> np.ndarray:
    """Frames `first` to `end` of the clip, uint8 [f, H, W, 3]: a coloured wave that the seed starts and that moves."""
    time_f = np.arange(first, end).reshape(-1, 1, 1)
    y_H = np.arange(request.height).reshape(1, -1, 1)
    x_W = np.arange(request.width).reshape(1, 1, -1)
    places = np.arange(request.width + request.height + 2 * end)
    wave = (np.sin(0.1 * places + request.seed % 97) * (0 if flat else 100) + 128).astype(np.uint8)
    return np.repeat(wave[x_W + y_H + 2 * time_f][..., None], 3, axis=-1)


def _sound(request: RenderRequest, clip: Clip, script: "_Script") -> np.ndarray:
    time_N = np.arange(clip.num_audio_samples) / AUDIO_SAMPLE_RATE
    tone = 0.0 if script.has("blank") else 0.2
    sound = (tone * np.sin(2 * np.pi * (220 + request.seed % FPS) * time_N)).astype(np.float32)
    if script.has("nan"):
        sound[-1] = np.nan
    return np.stack([sound, sound])


class _Script:
    """The directives of one prompt that concern this attempt and this rank."""

    def __init__(self, request: RenderRequest, rank: int) -> None:
        self._directives: dict[str, tuple[float, int]] = {}
        for name, number, on_rank, at_step, on_attempt in _DIRECTIVE.findall(request.prompt):
            if on_attempt and int(on_attempt.split()[-1]) != request.attempt:
                continue
            if on_rank and int(on_rank.split()[-1]) != rank:
                continue
            self._directives[name] = (float(number or 0), int(at_step.split()[-1]) if at_step else 1)

    def has(self, name: str) -> bool:
        return name in self._directives

    def seconds(self, name: str) -> float:
        return self._directives.get(name, (0.0, 0))[0]

    def meet_fate(self, step: int) -> None:
        for name, (_, at_step) in self._directives.items():
            if at_step == step:
                self._meet(name)

    def _meet(self, name: str) -> None:
        if name == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "hang":
            time.sleep(3600)
        elif name == "invalid":
            raise InvalidRequest("the prompt asks for a refusal")
        elif name == "value error":
            raise ValueError("bad reference")
        elif name == "generation error":
            raise GenerationError("the latents are not finite", stage="denoising")
        elif name == "odd words":
            raise GenerationError("the tensor \0 of \ud800", stage="denoising")
        elif name == "out of memory":
            raise OutOfMemory("no memory left", stage="denoising")
        elif name == "raise":
            raise RuntimeError("a bug")
