"""The inference contract is read from the checkpoint, checked whole, and refused with file, field and value named."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rushes_core.contract import InferenceContract, load_contract
from rushes_core.errors import CheckpointError
from support.permissions import unprivileged

CONTRACT: dict[str, Any] = {
    "schema_version": "fasth3-inference-contract-v1",
    "model_id": "somebody/a-student",
    "task": "t2av",
    "attention_backend": "VIDEO_SPARSE_ATTN_H3",
    "vsa_kernel": "sm100a",
    "vsa_sparsity": 0.8,
    "vsa_tile_size": 64,
    "dmd_denoising_steps": [999, 874, 749, 624, 500, 375, 250, 125],
    "transformer_forwards": 8,
    "num_inference_steps": 9,
    "guidance_scale": 1.0,
    "video_scheduler_shift": 10.0,
    "audio_scheduler_shift": 3.0,
    "num_gpus": 4,
}


def write(path: Path, **changes: Any) -> Path:
    contract = {key: value for key, value in (CONTRACT | changes).items() if value is not ...}
    path.joinpath("fastvideo_inference.json").write_text(json.dumps(contract))
    for folder, shift in (("scheduler", 10.0), ("audio_scheduler", 3.0)):
        (path / folder).mkdir(exist_ok=True)
        config = {"_class_name": "MiniMaxH3Scheduler", "_diffusers_version": "0.36.0.dev0", "shift": shift}
        (path / folder / "scheduler_config.json").write_text(json.dumps(config))
    return path


def test_published_contract_is_read(tmp_path: Path) -> None:
    contract = load_contract(write(tmp_path))
    assert contract == InferenceContract(
        schema_version="fasth3-inference-contract-v1",
        model_id="somebody/a-student",
        task="t2va",
        attention_backend="VIDEO_SPARSE_ATTN_H3",
        vsa_sparsity=0.8,
        vsa_tile_size=64,
        dmd_denoising_steps=(999, 874, 749, 624, 500, 375, 250, 125),
        guidance_scale=1.0,
        video_scheduler_shift=10.0,
        audio_scheduler_shift=3.0,
    )
    assert contract.num_forwards == 8


def test_four_step_student_needs_no_change_of_code(tmp_path: Path) -> None:
    steps = {"dmd_denoising_steps": [999, 749, 500, 250], "transformer_forwards": 4, "num_inference_steps": 5}
    contract = load_contract(write(tmp_path, vsa_sparsity=0.9, **steps))
    assert (contract.num_forwards, contract.vsa_sparsity) == (4, 0.9)


def test_shifts_come_from_the_schedulers_when_the_contract_is_silent(tmp_path: Path) -> None:
    contract = load_contract(write(tmp_path, video_scheduler_shift=..., audio_scheduler_shift=...))
    assert (contract.video_scheduler_shift, contract.audio_scheduler_shift) == (10.0, 3.0)


def test_model_type_stands_in_for_task(tmp_path: Path) -> None:
    assert load_contract(write(tmp_path, task=..., model_type="t2av")).task == "t2va"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("schema_version", "fasth3-inference-contract-v2", "fasth3-inference-contract-v1"),
        ("schema_version", ..., "is missing"),
        ("model_id", "", "a non-empty string"),
        ("model_id", 7, "a non-empty string"),
        ("task", "i2v", "'t2av'"),
        ("task", ..., "'t2av'"),
        ("attention_backend", "FLASH_ATTN", "VIDEO_SPARSE_ATTN_H3"),
        ("vsa_sparsity", 1.0, "0 <= vsa_sparsity < 1"),
        ("vsa_sparsity", -0.1, "0 <= vsa_sparsity < 1"),
        ("vsa_sparsity", "0.8", "a number"),
        ("vsa_sparsity", True, "a number"),
        ("vsa_tile_size", 128, "64"),
        ("vsa_tile_size", 64.0, "an integer"),
        ("guidance_scale", 5.0, "1.0"),
        ("dmd_denoising_steps", [], "strictly decreasing"),
        ("dmd_denoising_steps", [999, 999, 749, 624, 500, 375, 250, 125], "strictly decreasing"),
        ("dmd_denoising_steps", [1001, 874, 749, 624, 500, 375, 250, 125], "1..1000"),
        ("dmd_denoising_steps", [999, 874, 749, 624, 500, 375, 250, 0], "1..1000"),
        ("dmd_denoising_steps", [999.0, 874, 749, 624, 500, 375, 250, 125], "integers"),
        ("dmd_denoising_steps", "999", "integers"),
        ("transformer_forwards", 4, "8"),
        ("transformer_forwards", ..., "an integer"),
        ("num_inference_steps", 8, "9"),
        ("video_scheduler_shift", 12.0, "10.0, the shift of scheduler/scheduler_config.json"),
        ("audio_scheduler_shift", 10.0, "3.0, the shift of audio_scheduler/scheduler_config.json"),
        ("pdd_steps", 32, "not implemented"),
        ("grid_max_t", 0.999, "not implemented"),
        ("transformer_component", "transformer_ref", "'transformer'"),
        ("checkpoint_step", "1300", "an integer"),
    ],
)
def test_bad_field_is_refused_by_name(tmp_path: Path, field: str, value: Any, expected: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_contract(write(tmp_path, **{field: value}))
    message = str(raised.value)
    assert "fastvideo_inference.json" in message
    assert field in message or field == "task"
    assert expected in message


def test_reference_student_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model_type is 'ref2va'.*references"):
        load_contract(write(tmp_path, task=..., model_type="ref2va"))


def test_all_faults_are_listed_together(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_contract(write(tmp_path, vsa_sparsity=2, guidance_scale=3.5, num_inference_steps=1))
    assert all(name in str(raised.value) for name in ("vsa_sparsity", "guidance_scale", "num_inference_steps"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not readable JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"task": "t2av", "task": "t2av"}', "the key 'task' more than once"),
        ('{"vsa_sparsity": NaN}', "NaN, which is no JSON number"),
        ("[" * 100_000, "not readable JSON"),
        ("\udcff", "not readable JSON"),
    ],
    ids=["cut", "list", "duplicate", "nan", "deep", "not utf-8"],
)
def test_unreadable_contract_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    write(tmp_path).joinpath("fastvideo_inference.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"fastvideo_inference\.json: ") as raised:
        load_contract(tmp_path)
    assert expected in str(raised.value)


@pytest.mark.parametrize("folder", ["scheduler", "audio_scheduler"])
class TestScheduler:
    def test_missing_config_is_refused(self, tmp_path: Path, folder: str) -> None:
        (write(tmp_path) / folder / "scheduler_config.json").unlink()
        with pytest.raises(CheckpointError, match=rf"/{folder}/scheduler_config\.json: missing"):
            load_contract(tmp_path)

    @pytest.mark.parametrize(
        "change",
        [{"shift": 0}, {"shift": "10"}, {"_class_name": "EulerScheduler"}, {"num_train_timesteps": 500}],
        ids=["zero", "text", "class", "unknown key"],
    )
    def test_bad_config_is_refused(self, tmp_path: Path, folder: str, change: dict[str, Any]) -> None:
        config = {"_class_name": "MiniMaxH3Scheduler", "shift": 3.0} | change
        (write(tmp_path) / folder / "scheduler_config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=rf"/{folder}/scheduler_config\.json: {next(iter(change))} is"):
            load_contract(tmp_path)


class TestDirectory:
    def test_base_model_is_recognised(self, tmp_path: Path) -> None:
        tmp_path.joinpath("modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
        with pytest.raises(CheckpointError, match="base MiniMax-H3"):
            load_contract(tmp_path)

    def test_other_model_is_refused(self, tmp_path: Path) -> None:
        tmp_path.joinpath("model_index.json").write_text('{"_class_name": "WanPipeline"}')
        with pytest.raises(CheckpointError, match="'WanPipeline': another model"):
            load_contract(tmp_path)

    def test_missing_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no such directory"):
            load_contract(tmp_path / "absent")

    def test_file_is_refused(self, tmp_path: Path) -> None:
        tmp_path.joinpath("file").touch()
        with pytest.raises(CheckpointError, match="not a directory"):
            load_contract(tmp_path / "file")

    def test_empty_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="empty directory"):
            load_contract(tmp_path)

    def test_loop_of_links_is_refused(self, tmp_path: Path) -> None:
        tmp_path.joinpath("loop").symlink_to(tmp_path / "loop")
        with pytest.raises(CheckpointError, match="loop: "):
            load_contract(tmp_path / "loop")

    def test_directory_that_can_only_be_listed_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder)).chmod(0o644)
            with unprivileged(), pytest.raises(CheckpointError, match=f"{folder}/.*: Permission denied"):
                load_contract(Path(folder))

    @pytest.mark.parametrize(
        "make", [Path.mkdir, lambda path: path.symlink_to("../../blobs/0")], ids=["folder", "link"]
    )
    def test_contract_that_is_there_and_no_file_is_not_taken_for_a_base_model(
        self, tmp_path: Path, make: Callable[[Path], object]
    ) -> None:
        tmp_path.joinpath("modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
        make(tmp_path / "fastvideo_inference.json")
        with pytest.raises(CheckpointError, match=r"inference\.json: (not a file|a link that leads nowhere)$"):
            load_contract(tmp_path)
