from collections.abc import Iterator

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.checkpoint.weights import InMemoryWeights
from rushes_worker.model.block import Block
from rushes_worker.model.modulation import Modulation, time_embedding
from rushes_worker.model.parameters import Parameters
from rushes_worker.model.sequence import Modality, PackedSequence
from rushes_worker.model.transformer import Transformer
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.schedule import Schedule
from support.oracle import diffusers_inputs, diffusers_transformer, student_weights
from support.tiny_model import Clip, tiny_config, tiny_contract
from torch import Tensor

# fp32 sums in another order, through a few layers of activations of order one
TOLERANCE = {"atol": 2e-4, "rtol": 0}
CONFIG = tiny_config()
SCHEDULE = Schedule.from_contract(tiny_contract())
CLIPS = [Clip(), Clip(1, 1, 1, 2, 2), Clip(63, 33, 5, 14, 6), Clip(65, 5, 9, 8, 8)]


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    return diffusers_transformer(CONFIG)


@pytest.fixture(autouse=True)
def inference_mode() -> object:
    with torch.inference_mode():
        yield


def load(
    tensors: dict[str, Tensor],
    *,
    config: TransformerConfig = CONFIG,
    sparsity: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    return Transformer(
        config,
        InMemoryWeights(tensors),
        schedule=SCHEDULE,
        sparsity=sparsity,
        device="cpu",
        dtype=dtype,
        parallel=SequenceParallel.single(),
    )


def run(
    transformer: Transformer, clip: Clip, step: int = 0, config: TransformerConfig = CONFIG
) -> tuple[Tensor, Tensor]:
    sequence = PackedSequence.build(config, **clip.shape)
    audio_rows, video_rows = clip.latent_rows(config)
    text_rows = transformer.refine(clip.text_embeds(config))
    return transformer.forward(step, text_rows, audio_rows, video_rows, sequence)


def expect(oracle: torch.nn.Module, clip: Clip, step: int = 0) -> tuple[Tensor, Tensor]:
    inputs = diffusers_inputs(clip, CONFIG, SCHEDULE.video.timesteps[step], SCHEDULE.audio.timesteps[step])
    video, audio = oracle(**inputs, return_dict=False)
    return audio[0], video[0]


class TestAgainstDiffusers:
    @pytest.mark.parametrize("length", [1, 7, 130])
    def test_refined_text(self, oracle: torch.nn.Module, length: int) -> None:
        embeds = Clip(length).text_embeds(CONFIG)
        expected = oracle.token_refiner(oracle.context_embedder(embeds[None]))[0]
        torch.testing.assert_close(load(student_weights(oracle)).refine(embeds), expected, **TOLERANCE)

    def test_one_block(self, oracle: torch.nn.Module) -> None:
        clip, step, layer = Clip(), 3, 1
        sequence = PackedSequence.build(CONFIG, **clip.shape)
        tags = torch.cat([torch.full((segment.num_rows,), segment.modality) for segment in sequence.segments])
        states = torch.randn(sequence.num_rows, CONFIG.hidden_size, generator=torch.Generator().manual_seed(5))
        times = torch.stack([SCHEDULE.video.timesteps[step], SCHEDULE.audio.timesteps[step]])
        expected = oracle.transformer_blocks[layer](
            states[None],
            oracle.time_embedder(oracle.time_proj(times)),
            3 * (tags == Modality.AUDIO).long() + tags,
            oracle.rope(sequence.positions_S3),
        )[0]

        parameters = Parameters(InMemoryWeights(student_weights(oracle)), torch.device("cpu"), torch.float32)
        modulation = Modulation(CONFIG, parameters, SCHEDULE)
        parallel = SequenceParallel.single()
        block = Block(
            CONFIG, parameters.under(f"transformer_blocks.{layer}"), slice(0, 4), 0.0, parallel, None, torch.float32
        )
        trade = parallel.plan_trade(sequence.num_rows)
        due = block(states, None, modulation.at(step).block(layer), sequence.tags_S, sequence, trade)
        actual = states + due.rows_SC * due.gate_MC[tags]
        torch.testing.assert_close(actual, expected, **TOLERANCE)

    @pytest.mark.parametrize("clip", CLIPS, ids=str)
    def test_one_forward(self, oracle: torch.nn.Module, clip: Clip) -> None:
        actual = run(load(student_weights(oracle)), clip)
        for mine, theirs in zip(actual, expect(oracle, clip), strict=True):
            torch.testing.assert_close(mine, theirs, **TOLERANCE)

    def test_every_step_of_the_schedule(self, oracle: torch.nn.Module) -> None:
        transformer = load(student_weights(oracle))
        for step in range(SCHEDULE.num_steps):
            for mine, theirs in zip(run(transformer, Clip(), step), expect(oracle, Clip(), step), strict=True):
                torch.testing.assert_close(mine, theirs, **TOLERANCE)

    def test_denoised_latents(self, oracle: torch.nn.Module) -> None:
        transformer, clip = load(student_weights(oracle)), Clip(3, 5, 4, 6, 6)
        sequence = PackedSequence.build(CONFIG, **clip.shape)
        text_rows = transformer.refine(clip.text_embeds(CONFIG))
        audio, video = clip.latent_rows(CONFIG)
        schedulers = [MiniMaxH3Scheduler(shift=shift) for shift in (10.0, 3.0)]
        for scheduler, grid in zip(schedulers, (SCHEDULE.video, SCHEDULE.audio), strict=True):
            scheduler.set_timesteps(sigmas=grid.sigmas)
        expected_video, expected_audio = video, audio
        for step in range(SCHEDULE.num_steps):
            audio_velocity, video_velocity = transformer.forward(step, text_rows, audio, video, sequence)
            audio = SCHEDULE.audio.step(step, audio, audio_velocity)
            video = SCHEDULE.video.step(step, video, video_velocity)

            times = [scheduler.timesteps[step] for scheduler in schedulers]
            inputs = diffusers_inputs(clip, CONFIG, *times)
            inputs |= {"hidden_states": expected_video[None], "audio_hidden_states": expected_audio[None]}
            velocities = oracle(**inputs, return_dict=False)
            expected_video = schedulers[0].step(velocities[0][0], times[0], expected_video, return_dict=False)[0]
            expected_audio = schedulers[1].step(velocities[1][0], times[1], expected_audio, return_dict=False)[0]
        torch.testing.assert_close(video, expected_video, **TOLERANCE)
        torch.testing.assert_close(audio, expected_audio, **TOLERANCE)


class TestSparseStudent:
    def test_gate_changes_the_result(self, oracle: torch.nn.Module) -> None:
        clip = Clip()
        without, gated = (run(load(student_weights(oracle, gate_scale=scale)), clip) for scale in (0.0, 0.2))
        assert all((a - b).abs().amax() > 1e-2 for a, b in zip(without, gated, strict=True))

    def test_sparsity_changes_the_result(self, oracle: torch.nn.Module) -> None:
        clip = Clip(7, 9, 9, 16, 16)
        tensors = student_weights(oracle)
        dense, sparse = (run(load(tensors, sparsity=sparsity), clip) for sparsity in (0.0, 0.8))
        assert all((a - b).abs().amax() > 1e-2 for a, b in zip(dense, sparse, strict=True))

    def test_missing_gate_is_an_error(self, oracle: torch.nn.Module) -> None:
        tensors = student_weights(oracle)
        del tensors["transformer_blocks.1.attn.to_gate_compress.weight"]
        with pytest.raises(KeyError, match=r"transformer_blocks\.1\.attn\.to_gate_compress\.weight"):
            load(tensors)

    def test_every_stored_tensor_matters(self, oracle: torch.nn.Module) -> None:
        tensors = student_weights(oracle, gate_scale=0.2)
        clip = Clip(5, 3, 5, 8, 8)
        expected = run(load(tensors), clip, step=2)
        generator = torch.Generator().manual_seed(4)
        for name, tensor in tensors.items():
            changed = tensors | {name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)}
            actual = run(load(changed), clip, step=2)
            assert any((a - b).abs().amax() > 1e-4 for a, b in zip(actual, expected, strict=True)), name

    def test_swapped_value_and_gate_halves_are_noticed(self, oracle: torch.nn.Module) -> None:
        tensors = student_weights(oracle)
        name = "transformer_blocks.0.ff.net.0.proj.weight"
        value, gate = tensors[name].chunk(2)
        swapped = run(load(tensors | {name: torch.cat([gate, value])}), Clip())
        differences = [(a - b).abs().amax() for a, b in zip(swapped, expect(oracle, Clip()), strict=True)]
        assert min(differences) > 100 * TOLERANCE["atol"]

    @pytest.mark.parametrize("length", [1, 63, 64, 127, 128])
    def test_spare_text_rows_change_nothing(self, oracle: torch.nn.Module, length: int) -> None:
        transformer = load(student_weights(oracle, gate_scale=0.2), sparsity=0.5)
        clip = Clip(length, 9, 9, 14, 14)
        expected = run(transformer, clip, step=2)
        sequence = PackedSequence.build(CONFIG, **clip.shape, text_capacity=128)
        text_embeds = torch.nn.functional.pad(clip.text_embeds(CONFIG), (0, 0, 0, 128 - length))
        text_rows = transformer.refine(text_embeds, torch.tensor([length]))
        audio, video = clip.latent_rows(CONFIG)
        for step in (2, torch.tensor([2])):
            actual = transformer.forward(step, text_rows, audio, video, sequence)
            for mine, theirs in zip(actual, expected, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("name", ["text", "audio", "video"])
    def test_wrong_number_of_rows_is_refused(self, oracle: torch.nn.Module, name: str) -> None:
        transformer, clip = load(student_weights(oracle)), Clip()
        sequence = PackedSequence.build(CONFIG, **clip.shape)
        audio, video = clip.latent_rows(CONFIG)
        rows = {"text": transformer.refine(clip.text_embeds(CONFIG)), "audio": audio, "video": video}
        rows[name] = rows[name][1:]
        with pytest.raises(ValueError, match=f"{name} rows, got {len(rows[name])}"):
            transformer.forward(0, rows["text"], rows["audio"], rows["video"], sequence)


class TestModulation:
    def parameters(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> Parameters:
        return Parameters(InMemoryWeights(tensors), torch.device("cpu"), dtype)

    def test_time_embedding_puts_cosines_first_and_does_not_scale_time(self, oracle: torch.nn.Module) -> None:
        times = torch.tensor([0.0, 0.25, 0.9])
        tensors = student_weights(oracle)
        weights = [tensors[f"time_embedder.linear_{i}.{name}"] for i in (1, 2) for name in ("weight", "bias")]
        expected = oracle.time_embedder(oracle.time_proj(times))
        torch.testing.assert_close(time_embedding(times, CONFIG.freq_dim, *weights), expected, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_tables_equal_what_each_step_would_compute(self, oracle: torch.nn.Module, dtype: torch.dtype) -> None:
        tensors = student_weights(oracle, dtype=dtype)
        model = oracle if dtype == torch.float32 else half_precision()
        modulation = Modulation(CONFIG, self.parameters(tensors, dtype), SCHEDULE)
        for step in range(SCHEDULE.num_steps):
            times = torch.stack([SCHEDULE.video.timesteps[step], SCHEDULE.audio.timesteps[step]])
            embedding = model.time_embedder(model.time_proj(times))
            for layer, block in enumerate(model.transformer_blocks):
                expected = block.adaln_proj(embedding)
                for modality, row in ((Modality.VIDEO, 0), (Modality.TEXT, 1), (Modality.AUDIO, 5)):
                    for mine, theirs in zip(modulation.at(step).block(layer), expected, strict=True):
                        assert mine.dtype == dtype
                        torch.testing.assert_close(mine[modality], theirs[row], atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("step", range(SCHEDULE.num_steps))
    def test_step_may_lie_on_the_device(self, oracle: torch.nn.Module, step: int) -> None:
        modulation = Modulation(CONFIG, self.parameters(student_weights(oracle), torch.float32), SCHEDULE)
        there, here = modulation.at(torch.tensor([step])), modulation.at(step)
        assert torch.equal(there.blocks_LM6C, here.blocks_LM6C)
        assert torch.equal(there.out_M2C, here.out_M2C)

    def test_projections_are_not_kept(self, oracle: torch.nn.Module) -> None:
        tensors = student_weights(oracle)
        transformer = load(tensors)
        held = {tensor.untyped_storage().data_ptr() for tensor in held_tensors(transformer)}
        kept = {name for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() in held}
        assert "norm_out.norm.weight" in kept
        assert not {name for name in kept if "adaln_proj" in name or "linear" in name}
        tables = [tensor for tensor in held_tensors(transformer) if tensor.ndim >= 4]
        layers, steps, hidden = CONFIG.num_layers, SCHEDULE.num_steps, CONFIG.hidden_size
        assert [tuple(table.shape) for table in tables] == [(layers, steps, 3, 6, hidden), (steps, 3, 2, hidden)]


class TestPrecision:
    def test_fp32_groups_stay_fp32(self, oracle: torch.nn.Module) -> None:
        transformer = load(student_weights(oracle, dtype=torch.bfloat16), dtype=torch.bfloat16)
        held = {tensor.untyped_storage().data_ptr(): tensor for tensor in held_tensors(transformer)}
        names = ("proj_in", "audio_proj_in", "proj_out", "audio_proj_out")
        model = dict(oracle.named_parameters())
        for name in (f"{module}.{part}" for module in names for part in ("weight", "bias")):
            assert held[model[name].untyped_storage().data_ptr()].dtype == torch.float32
        assert sum(tensor.dtype == torch.float32 for tensor in held.values()) == 2 * len(names)

    def test_bf16_stays_near_fp32(self, oracle: torch.nn.Module) -> None:
        tensors = student_weights(oracle, dtype=torch.bfloat16)
        clip = Clip()
        low = run(load(tensors, dtype=torch.bfloat16), clip)
        high = run(load({name: tensor.float() for name, tensor in tensors.items()}), clip)
        for a, b in zip(low, high, strict=True):
            assert a.dtype == torch.float32
            # three layers of 8-bit significands; a mistake moves the result by its own size
            assert (a - b).abs().amax() < 0.05 * b.abs().amax()


def half_precision() -> torch.nn.Module:
    """Diffusers' model in bf16, with its fp32 modules."""
    copy = diffusers_transformer(CONFIG)
    for name, parameter in copy.named_parameters():
        if not name.startswith(("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")):
            parameter.data = parameter.data.bfloat16()
    return copy


def held_tensors(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor reachable from an object's attributes and containers."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    else:
        slots = getattr(type(value), "__slots__", ())
        children = [*getattr(value, "__dict__", {}).values(), *(getattr(value, slot) for slot in slots)]
    for child in children:
        if not isinstance(child, str | int | float | type):
            yield from held_tensors(child, seen)
