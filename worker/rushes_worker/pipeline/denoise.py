"""The denoise loop: one forward per step feeds the solver steps of both modalities, one graph for each shape.

Shapes: L text rows, 2A audio rows, N video rows, S of them all; C hidden channels, R rotary angles.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.sequence import PackedSequence, patches
from rushes_worker.model.transformer import Transformer
from rushes_worker.pipeline.clip_shape import ClipShape
from rushes_worker.pipeline.graphs import Graphs, Work
from rushes_worker.pipeline.schedule import Schedule, step_
from rushes_worker.pipeline.slots import Latents, RequestSlot
from rushes_worker.pipeline.workspace import Carving, Workspace

MAX_SHAPES = 128
"""Shapes whose tile maps are kept; they take 2 to 5 MiB each."""


class Denoiser:
    """Turns a slot's noise into latents."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer: Transformer,
        schedule: Schedule,
        graphs: Graphs,
        workspace: Workspace,
    ) -> None:
        self._config = config
        self._transformer = transformer
        self._schedule = schedule
        self._graphs = graphs
        self._workspace = workspace
        self._shapes: OrderedDict[tuple[ClipShape, int], _Shape] = OrderedDict()

    def denoise(self, slot: RequestSlot, shape: ClipShape, bank: Latents, after_step: Callable[[int], None]) -> Tensor:
        """Denoise the slot's noise into the bank, from the slot's text. Latents stay fp32 between steps.

        The host is never further ahead of the device than one step.

        Args:
            after_step: called with the number of steps that are queued; what it raises ends the loop.

        Returns:
            (1,) bool on the device: whether the latents are finite.
        """
        capacity = slot.text_capacity
        state = self._shape(shape, capacity)
        state.load(slot)

        def run(name: str, work: Work) -> None:
            self._graphs.run((name, shape, capacity), work)

        run("begin", state.begin)
        before: torch.cuda.Event | None = None
        for step in range(self._schedule.num_steps):
            run("step", state.step)
            if before is not None:
                before.synchronize()
            before = _mark(state.device)
            after_step(step + 1)
        run("end", state.end)
        state.store(bank)
        return state.is_finite

    def prepare(self, shape: ClipShape, capacity: int) -> None:
        """Capture the graphs of a shape."""
        state = self._shape(shape, capacity)
        state.clear()
        for name, work, rehearsal in (
            ("begin", state.begin, state.begin),
            ("step", state.step, state.rehearse),
            ("end", state.end, state.end),
        ):
            self._graphs.prepare((name, shape, capacity), work, rehearsal)

    def measure(self, shape: ClipShape, capacity: int) -> int:
        """Bytes that a step of this shape passes through."""
        state = self._shape(shape, capacity)
        state.clear()
        self._graphs.run(None, state.begin)
        return self._graphs.measure(state.rehearse)

    @staticmethod
    def workspace_bytes(config: TransformerConfig, shape: ClipShape, capacity: int, dtype: torch.dtype) -> int:
        """What a shape takes of the workspace."""
        carving = Carving()
        _carve(carving, config, shape, capacity, dtype)
        return carving.num_bytes

    def _shape(self, shape: ClipShape, capacity: int) -> "_Shape":
        key = (shape, capacity)
        state = self._shapes.get(key)
        if state is None:
            state = _Shape(self._config, self._transformer, self._schedule, self._workspace, shape, capacity)
            self._shapes[key] = state
            if len(self._shapes) > MAX_SHAPES:
                (old_shape, old_capacity), _ = self._shapes.popitem(last=False)
                self._graphs.drop((name, old_shape, old_capacity) for name in ("begin", "step", "end"))
        self._shapes.move_to_end(key)
        return state


class _Shape:
    """What the steps of one shape read and write, at fixed addresses."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer: Transformer,
        schedule: Schedule,
        workspace: Workspace,
        shape: ClipShape,
        capacity: int,
    ) -> None:
        self._config = config
        self._transformer = transformer
        self._shape = shape
        self.device = transformer.device
        tensors = _carve(
            workspace.carve(Denoiser.workspace_bytes(config, shape, capacity, transformer.dtype)),
            config,
            shape,
            capacity,
            transformer.dtype,
        )
        self._text_rows, self._audio_rows, self._video_rows, cos_SR, sin_SR, self._length, self._step = tensors
        sequence = PackedSequence.build(
            config,
            text_length=1,
            text_capacity=capacity,
            audio_latents=shape.clip.num_audio_latents,
            latent_frames=shape.clip.num_latent_frames,
            latent_height=shape.latent_height,
            latent_width=shape.latent_width,
            device=self.device,
        )
        self._sequence = replace(sequence, cos_SR=cos_SR, sin_SR=sin_SR)
        transformer.prepare(self._sequence)
        grids = (schedule.audio, schedule.video)
        self._coefficients_N23 = torch.stack([grid.coefficients for grid in grids], dim=1).to(self.device)
        self.is_finite = torch.zeros(1, dtype=torch.bool, device=self.device)

    def load(self, slot: RequestSlot) -> None:
        self._text_rows.copy_(slot.text_rows)
        self._length.copy_(slot.length)
        self._audio_rows.copy_(slot.noise.audio_rows(self._shape))
        self._in_patches.copy_(patches(slot.noise.video_CTHW(self._shape), self._config.patch_size))
        self._step.zero_()

    def clear(self) -> None:
        """A prompt of one token, and latents of zeros."""
        for x in (self._text_rows, self._audio_rows, self._video_rows, self._step):
            x.zero_()
        self._length.fill_(1)

    def begin(self) -> None:
        """Rotation tables and tile map of the prompt's length."""
        self._sequence.shorten_text_(self._length, self._config)

    def step(self) -> None:
        self._advance(None)

    def rehearse(self) -> None:
        """A step of one block."""
        self._advance(1)

    def end(self) -> None:
        torch.logical_and(
            self._audio_rows.isfinite().all(), self._video_rows.isfinite().all(), out=self.is_finite.squeeze(0)
        )

    def store(self, bank: Latents) -> None:
        bank.audio_rows(self._shape).copy_(self._audio_rows)
        patches(bank.video_CTHW(self._shape), self._config.patch_size).copy_(self._in_patches)

    def _advance(self, depth: int | None) -> None:
        velocities = self._transformer.forward(
            self._step, self._text_rows, self._audio_rows, self._video_rows, self._sequence, depth=depth
        )
        of_both = self._coefficients_N23.index_select(0, self._step).squeeze(0)
        for rows, velocity, coefficients in zip((self._audio_rows, self._video_rows), velocities, of_both, strict=True):
            step_(rows, velocity, coefficients)
        self._step += 1

    @property
    def _in_patches(self) -> Tensor:
        """(T, h, w, C', 1, p, p): the video rows as `patches` orders them."""
        _, ph, pw = self._config.patch_size
        grid = (self._shape.clip.num_latent_frames, self._shape.latent_height // ph, self._shape.latent_width // pw)
        return self._video_rows.view(*grid, self._config.in_channels, 1, ph, pw)


def _carve(
    carving: Carving, config: TransformerConfig, shape: ClipShape, capacity: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Text, audio and video rows, cosines and sines, length and step."""
    video_rows = shape.num_video_latents // (config.patch_size[1] * config.patch_size[2])
    rows = capacity + shape.num_audio_rows + video_rows
    num_angles = 3 * config.rope_freq_dim
    return (
        carving.take(capacity, config.hidden_size, dtype=dtype),
        carving.take(shape.num_audio_rows, config.audio_in_channels, dtype=torch.float32),
        carving.take(video_rows, config.patch_features, dtype=torch.float32),
        carving.take(rows, num_angles, dtype=torch.float32),
        carving.take(rows, num_angles, dtype=torch.float32),
        carving.take(1, dtype=torch.int64),
        carving.take(1, dtype=torch.int64),
    )


def _mark(device: torch.device) -> "torch.cuda.Event | None":
    """The place that the device's queue has come to."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
