"""Text, denoise steps and results in the buffers that clips of all shapes share; on the CPU nothing is captured."""

from dataclasses import replace

import pytest
import torch
from rushes_core.clip import Clip
from rushes_worker.checkpoint.weights import InMemoryWeights
from rushes_worker.model.transformer import Transformer
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.clip_shape import ClipShape
from rushes_worker.pipeline.denoise import Denoiser
from rushes_worker.pipeline.graphs import Graphs, MemoryUse
from rushes_worker.pipeline.noise import draw_noise_
from rushes_worker.pipeline.outbound import HostRing, Outbound
from rushes_worker.pipeline.schedule import Schedule
from rushes_worker.pipeline.slots import Latents, RequestSlot
from rushes_worker.pipeline.text import capacity_for
from rushes_worker.pipeline.workspace import Carving, Workspace
from support.rendering import RecordingReporter
from support.tiny_model import random_weights, tiny_config, tiny_contract
from torch import Tensor

CPU = torch.device("cpu")
CONFIG = replace(tiny_config(), num_layers=2)
SMALL, WIDE = ClipShape(Clip(107), 2, 4), ClipShape(Clip(107), 4, 6)


@pytest.fixture(autouse=True)
def inference_mode() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    return Transformer(
        CONFIG,
        InMemoryWeights(random_weights(CONFIG)),
        schedule=Schedule.from_contract(tiny_contract()),
        sparsity=0.5,
        device=CPU,
        dtype=torch.float32,
        parallel=SequenceParallel.single(),
    )


def new_slot() -> RequestSlot:
    return RequestSlot(CONFIG, SMALL, text_capacity=64, device=CPU, dtype=torch.float32)


class Stage:
    """A denoiser with room for one shape, and what it leaves."""

    def __init__(self, transformer: Transformer, *, room: ClipShape = SMALL) -> None:
        self._transformer = transformer
        self._denoiser = Denoiser(
            CONFIG,
            transformer,
            Schedule.from_contract(tiny_contract()),
            Graphs(CPU, max_bytes=0),
            Workspace(CPU, Denoiser.workspace_bytes(CONFIG, room, 64, torch.float32)),
        )
        self._slot = new_slot()
        self._bank = Latents(CONFIG, room, CPU)

    def denoise(self, shape: ClipShape, *, num_tokens: int, capacity: int, seed: int = 7) -> tuple[Tensor, Tensor]:
        self._slot.hold(num_tokens, text_capacity=capacity)
        self._slot.draw_noise(seed, shape)
        embeds = torch.randn(num_tokens, CONFIG.text_dim, generator=torch.Generator().manual_seed(seed))
        padded = torch.nn.functional.pad(embeds, (0, 0, 0, capacity - num_tokens))
        self._slot.text_rows.copy_(self._transformer.refine(padded, self._slot.length))
        steps: list[int] = []
        is_finite = self._denoiser.denoise(self._slot, shape, self._bank, steps.append)
        assert steps == list(range(1, 9))
        assert bool(is_finite)
        return self._bank.video_CTHW(shape).clone(), self._bank.audio_rows(shape).clone()


def assert_close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


class TestDenoiser:
    @pytest.mark.parametrize("num_tokens", [1, 63, 64])
    def test_text_capacity_changes_nothing(self, transformer: Transformer, num_tokens: int) -> None:
        stage = Stage(transformer)
        exact = stage.denoise(SMALL, num_tokens=num_tokens, capacity=64)
        assert_close(stage.denoise(SMALL, num_tokens=num_tokens, capacity=192), exact)

    def test_shapes_take_turns_in_the_same_memory(self, transformer: Transformer) -> None:
        stage = Stage(transformer, room=WIDE)
        expected = {
            shape: Stage(transformer, room=shape).denoise(shape, num_tokens=9, capacity=64) for shape in (SMALL, WIDE)
        }
        for shape in (SMALL, WIDE, SMALL, WIDE):
            assert_close(stage.denoise(shape, num_tokens=9, capacity=64), expected[shape])
            stage.denoise(shape, num_tokens=60, capacity=192, seed=8)

    def test_a_shape_that_there_is_no_room_for_gets_its_own(self, transformer: Transformer) -> None:
        expected = Stage(transformer, room=WIDE).denoise(WIDE, num_tokens=9, capacity=64)
        assert_close(Stage(transformer).denoise(WIDE, num_tokens=9, capacity=64), expected)


class TestSlots:
    def test_hold_the_noise_of_their_request(self) -> None:
        slot = new_slot()
        slot.hold(5, text_capacity=64)
        slot.draw_noise(3, SMALL)
        video = torch.empty(CONFIG.in_channels, SMALL.clip.num_latent_frames, 2, 4)
        audio = torch.empty(2 * SMALL.clip.num_audio_latents, CONFIG.audio_in_channels)
        draw_noise_(3, video, audio)
        assert torch.equal(slot.noise.video_CTHW(SMALL), video)
        assert torch.equal(slot.noise.audio_rows(SMALL), audio)
        assert slot.length.tolist() == [5]

    def test_a_longer_text_gets_room(self) -> None:
        slot = new_slot()
        slot.hold(100, text_capacity=128)
        assert slot.text_rows.shape == (128, CONFIG.hidden_size)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 64), (950, 1024), (1024, 1024), (1025, 1088), (3000, 3008), (4000, 4096), (5000, 5056)],
)
def test_a_prompt_takes_a_capacity_that_has_few_rows_more(num_tokens: int, expected: int) -> None:
    assert capacity_for(num_tokens, (1024, 4096), other_rows=7_000) == expected
    assert capacity_for(num_tokens, (), other_rows=7_000) == -(-num_tokens // 64) * 64


class TestWorkspace:
    def test_tensors_lie_side_by_side(self) -> None:
        carving = Workspace(CPU, 4096).carve(2048)
        a, b = carving.take(3, 5, dtype=torch.float32), carving.take(7, dtype=torch.uint8)
        a.fill_(1), b.fill_(2)
        assert a.unique().tolist() == [1.0]
        assert a.is_contiguous()
        assert (b.data_ptr() - a.data_ptr()) % 256 == 0

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="4096 bytes has no room for byte 4100"):
            Workspace(CPU, 4096).carve(10).take(1025, dtype=torch.float32)

    def test_need_is_known_without_a_buffer(self) -> None:
        need = Carving()
        assert need.take(3, 5, dtype=torch.float32).device.type == "meta"
        need.take(1, dtype=torch.bool)
        assert need.num_bytes == 512


class TestGraphs:
    def test_work_of_the_cpu_is_just_done(self) -> None:
        graphs = Graphs(CPU, max_bytes=1 << 30)
        done: list[int] = []
        for _ in range(3):
            graphs.run("work", lambda: done.append(1))
        with graphs.plainly():
            graphs.run("work", lambda: done.append(2))
        graphs.reserve(1 << 40)
        assert graphs.measure(lambda: done.append(3)) == 0
        assert done == [1, 1, 1, 2, 3]
        assert not graphs.captures
        assert graphs.num_graphs == 0
        assert MemoryUse.now(CPU) == MemoryUse(0, 0, 0)

    def test_work_of_a_plain_plan_does_not_count_as_run_before(self) -> None:
        graphs = Graphs(CPU, max_bytes=1 << 30)
        with graphs.plainly():
            graphs.run("work", lambda: None)
        assert not graphs._seen
        graphs.run("work", lambda: None)
        assert graphs._seen == {"work"}


class TestOutbound:
    def test_the_one_before_stays_while_the_next_is_copied(self) -> None:
        ring = HostRing(4, torch.uint8, CPU)
        pixels, flag = torch.ones(1, 2, 2, 1, dtype=torch.uint8), torch.tensor([True])
        first = Outbound("frames", ring, pixels, flag, unit=0)
        pixels.fill_(2)
        flag.fill_(False)
        second = Outbound("frames", ring, pixels, flag, unit=1)
        seen = RecordingReporter()
        for outbound in (first, second):
            outbound.wait()
            outbound.hand_to(seen)
        assert (first.is_finite, second.is_finite) == (True, False)
        assert [int(seen.units[unit].max()) for unit in (0, 1)] == [1, 2]
