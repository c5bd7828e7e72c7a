"""`rushes checkpoint tiny | inspect | verify`: what is printed, and one clear line for whatever a user gets wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.main import main
from rushes_worker.checkpoint.directory import open_checkpoint
from support.checkpoints import edit_json

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


class TestTiny:
    def test_what_it_writes_opens(self, run: Run, tmp_path: Path) -> None:
        code, out, _ = run("tiny", tmp_path / "new", "--seed", 5, "--profile", "dense")
        assert code == 0
        assert "profile dense" in out
        open_checkpoint(tmp_path / "new")

    def test_content_is_not_overwritten(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        code, _, err = run("tiny", tmp_path)
        assert (code, err) == (2, f"rushes checkpoint: {tmp_path}: not empty\n")

    def test_file_is_refused(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        code, _, err = run("tiny", tmp_path / "file")
        assert (code, err) == (2, f"rushes checkpoint: {tmp_path / 'file'}: not a directory\n")


class TestInspect:
    def test_servable_directory(self, run: Run, tiny: Path) -> None:
        code, out, _ = run("inspect", tiny)
        assert code == 0
        for text in (
            "FastH3 student, 8 steps",
            "sparsity 0.9",
            "video 10, audio 3",
            "serves: yes",
            "text-to-video reads",
        ):
            assert text in out

    def test_json(self, run: Run, tiny: Path) -> None:
        code, out, _ = run("inspect", tiny, "--json")
        report = json.loads(out)
        assert code == 0
        assert report["serves"]
        assert report["contract"]["dmd_denoising_steps"][0] == 999
        assert report["components"]["transformer"]["dtypes"] == {"BF16": 52, "F32": 12}
        assert report["components"]["transformer"]["used_bytes"] == report["components"]["transformer"]["bytes"]
        assert 0 < report["used_bytes"] < report["bytes"]

    def test_problems_are_listed(self, run: Run, damaged: Path) -> None:
        (damaged / "vae" / "config.json").unlink()
        code, out, _ = run("inspect", damaged)
        assert code == 1
        assert "serves: no" in out
        assert f"- {damaged}/vae/config.json: missing" in out

    @pytest.mark.parametrize(
        ("file", "changes", "kind"),
        [
            ("fastvideo_inference.json", {"model_type": "ref2va", "pdd_steps": 32}, "OmniRef student"),
            (
                "transformer/config.json",
                {"quantization_config": {"quant_algo": "NVFP4"}},
                "NVFP4 quantised (transformer)",
            ),
            ("transformer/config.json", {"adaln_rank": 16}, "rank-reduced modulation (adaln_rank 16)"),
            ("fastvideo_inference.json", {"dmd_denoising_steps": [999, 749, 500, 250]}, "FastH3 student, 4 steps"),
        ],
    )
    def test_relatives_are_recognised(
        self, run: Run, damaged: Path, file: str, changes: dict[str, Any], kind: str
    ) -> None:
        edit_json(damaged / file, **changes)
        code, out, _ = run("inspect", damaged)
        assert code == 1
        assert kind in out.splitlines()[0]

    def test_base_model_is_recognised(self, run: Run, damaged: Path) -> None:
        (damaged / "fastvideo_inference.json").unlink()
        code, out, _ = run("inspect", damaged)
        assert code == 1
        assert out.startswith(f"{damaged}: base MiniMax-H3\n")

    def test_student_with_a_damaged_contract_is_recognised(self, run: Run, damaged: Path) -> None:
        (damaged / "fastvideo_inference.json").write_text("{")
        code, out, _ = run("inspect", damaged)
        assert code == 1
        assert out.startswith(f"{damaged}: FastH3 student whose contract cannot be read\n")

    @pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_lora_weights.safetensors"])
    def test_lora_is_recognised(self, run: Run, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        code, out, _ = run("inspect", tmp_path)
        assert code == 1
        assert "a LoRA, not a checkpoint" in out

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda path: None, "no such directory"),
            (lambda path: path.touch(), "not a directory"),
            (lambda path: path.mkdir(), "empty directory"),
            (lambda path: path.symlink_to(path), "link that leads nowhere"),
        ],
        ids=["absent", "file", "empty", "loop"],
    )
    @pytest.mark.parametrize("action", ["inspect", "verify"])
    def test_wrong_path_is_told_in_one_line(
        self, run: Run, tmp_path: Path, action: str, make: Callable[[Path], object], told: str
    ) -> None:
        make(tmp_path / "it")
        code, out, err = run(action, tmp_path / "it")
        assert code == 1
        assert any(told in line for line in (out + err).splitlines())
        assert len(err.splitlines()) == (1 if action == "verify" else 0)


class TestVerify:
    @pytest.fixture
    def inventory(self, run: Run, damaged: Path) -> Path:
        """An inventory of the copy as it was before a test damages it."""
        path = damaged.parent / "inventory.json"
        assert run("verify", damaged, "--write", path, "--revision", "3da2ddf")[0] == 0
        return path

    def test_undamaged_directory_is_as_listed(self, run: Run, damaged: Path, inventory: Path) -> None:
        code, out, _ = run("verify", damaged, "--inventory", inventory, "--revision", "3da2ddf")
        assert code == 0
        assert out.rstrip().endswith("as listed")

    def test_inventory_inside_the_directory_is_found_and_not_part_of_itself(self, run: Run, damaged: Path) -> None:
        inside = damaged / "rushes_inventory.json"
        for _ in range(2):
            assert run("verify", damaged, "--write", inside)[0] == 0
        assert run("verify", damaged)[0] == 0
        listed = {file["path"] for file in json.loads(inside.read_text())["files"]}
        assert "transformer/config.json" in listed
        assert inside.name not in listed

    def test_inventory_of_the_export_covers_the_transformer(self, run: Run, damaged: Path) -> None:
        code, out, _ = run("verify", damaged)
        assert code == 0
        assert "checkpoint_content.json" in out
        assert "not covered by this inventory" in out
        flip(damaged / "transformer" / "config.json")
        code, out, _ = run("verify", damaged)
        assert code == 1
        assert "- transformer/config.json: changed" in out

    def test_training_bookkeeping_may_be_absent(self, run: Run, damaged: Path) -> None:
        content = json.loads((damaged / "checkpoint_content.json").read_text())
        files = [*content["files"], {"path": ".complete", "size": 9, "sha256": "0" * 64}]
        edit_json(damaged / "checkpoint_content.json", files=files, file_count=len(files))
        code, out, _ = run("verify", damaged)
        assert code == 0
        assert "not part of the export: .complete" in out

    @pytest.mark.parametrize(
        ("damage", "told"),
        [
            (lambda path: flip(path / "vae/config.json"), "vae/config.json: changed, SHA-256"),
            (lambda path: (path / "vae/config.json").unlink(), "vae/config.json: missing"),
            (lambda path: (path / "vae/more").touch(), "vae/more: surplus"),
            (lambda path: os.truncate(path / "vae/config.json", 5), "vae/config.json: truncated, 5 bytes"),
            (lambda path: os.truncate(path / "vae/config.json", 5000), "vae/config.json: too long, 5000 bytes"),
        ],
        ids=["changed", "missing", "surplus", "truncated", "grown"],
    )
    def test_difference_is_named(
        self, run: Run, damaged: Path, inventory: Path, damage: Callable[[Path], object], told: str
    ) -> None:
        damage(damaged)
        code, out, _ = run("verify", damaged, "--inventory", inventory)
        assert code == 1
        assert f"- {told}" in out
        assert out.rstrip().endswith("differs")

    def test_other_revision_is_refused(self, run: Run, damaged: Path, inventory: Path) -> None:
        code, out, _ = run("verify", damaged, "--inventory", inventory, "--revision", "ffffff")
        assert code == 1
        assert "revision 3da2ddf, expected ffffff" in out

    def test_revision_of_a_download_is_read(self, run: Run, damaged: Path) -> None:
        folder = damaged / ".cache" / "huggingface" / "download"
        folder.mkdir(parents=True)
        (folder / "LICENSE.metadata").write_text("3da2ddf\netag\n1.0\n")
        assert run("verify", damaged, "--revision", "3da2ddf")[0] == 0
        assert run("verify", damaged, "--revision", "ffffff")[0] == 1

    def test_revision_of_the_base_model_is_compared_when_it_is_all_there_is(self, run: Run, damaged: Path) -> None:
        edit_json(damaged / "provenance.json", base_model="hf://MiniMaxAI/MiniMax-H3@abc")
        assert run("verify", damaged, "--revision", "abc")[0] == 0
        assert "(base_model): revision abc" in run("verify", damaged, "--revision", "abd")[1]

    def test_revision_that_nothing_states_is_refused(self, run: Run, damaged: Path) -> None:
        (damaged / "provenance.json").unlink()
        code, out, _ = run("verify", damaged, "--revision", "abc")
        assert code == 1
        assert "says nowhere which revision" in out

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"format": "other"}, "format is 'other'"),
            ({"files": []}, "files is missing or empty"),
            ({"file_count": 1}, "file_count is 1"),
            ({"aggregate_sha256": "0"}, "aggregate_sha256 is '0'"),
            ({"files": [{"path": "../x", "sha256": "0" * 64}]}, "'../x', expected a path inside"),
            ({"files": [{"path": "/etc/passwd", "sha256": "0" * 64}]}, "expected a path inside"),
            ({"files": [{"path": "x", "sha256": "0"}]}, "expected 64 hexadecimal digits"),
            ({"files": [{"path": "x", "sha256": "0" * 64, "size": -1}]}, "expected a number of bytes"),
            ({"files": [{"path": "x", "sha256": "0" * 64}] * 2}, "lists 'x' twice"),
        ],
    )
    def test_bad_inventory_is_refused_in_one_line(
        self, run: Run, damaged: Path, inventory: Path, changes: dict[str, Any], told: str
    ) -> None:
        edit_json(inventory, **changes)
        code, _, err = run("verify", damaged, "--inventory", inventory)
        assert code == 1
        assert told in err
        assert len(err.splitlines()) == 1

    def test_unreadable_inventory_is_refused_in_one_line(self, run: Run, damaged: Path, tmp_path: Path) -> None:
        (tmp_path / "broken.json").write_text("{")
        code, _, err = run("verify", damaged, "--inventory", tmp_path / "broken.json")
        assert code == 1
        assert "not readable JSON" in err

    def test_loop_of_folders_is_refused(self, run: Run, damaged: Path) -> None:
        (damaged / "vae" / "again").symlink_to(damaged)
        code, _, err = run("verify", damaged)
        assert code == 1
        assert "symbolic link to a folder that contains it" in err

    def test_linked_files_are_followed(self, run: Run, damaged: Path, inventory: Path) -> None:
        """A download cache keeps the files elsewhere and links to them."""
        blob = damaged.parent / "blob"
        (damaged / "vae" / "config.json").rename(blob)
        (damaged / "vae" / "config.json").symlink_to(blob)
        assert run("verify", damaged, "--inventory", inventory)[0] == 0
        open_checkpoint(damaged)


def flip(path: Path) -> None:
    """Change one byte and keep the length."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
