"""Which member of the MiniMax-H3 family a directory holds, told from its small files, servable or not."""

from pathlib import Path

from rushes_core.contract import CONTRACT_FILE, INDEX_FILES, PIPELINE_CLASS, refuse_directory
from rushes_core.errors import CheckpointError, CheckpointUnreadable
from rushes_core.json_file import read_json_object

_LORA_FILES = ("adapter_config.json", "pytorch_lora_weights.safetensors")
_COMPONENTS = ("transformer", "transformer_ref", "text_encoder", "vae", "audio_vae")


def recognise(path: Path) -> str:
    """A short description such as `FastH3 student, 8 steps` or `base MiniMax-H3`; `nothing` if none can be read."""
    try:
        if refuse_directory(path) is not None:
            return "nothing"
    except CheckpointUnreadable:
        return "nothing"
    contract = _object(path / CONTRACT_FILE)
    if contract is None:
        stands = (path / CONTRACT_FILE).exists() or (path / CONTRACT_FILE).is_symlink()
        return "FastH3 student whose contract cannot be read" if stands else _without_contract(path)
    if contract.get("model_type") == "ref2va" or contract.get("pdd_steps") is not None:
        return "FastH3 OmniRef student (renders from references)"
    transformer = _object(path / "transformer" / "config.json") or {}
    if transformer.get("adaln_rank") is not None:
        return f"FastH3 student with rank-reduced modulation (adaln_rank {transformer['adaln_rank']})"
    quantised = [name for name in _COMPONENTS if "quantization_config" in (_object(path / name / "config.json") or {})]
    if quantised:
        return f"FastH3 student, {_precision(path, quantised[0])} quantised ({', '.join(quantised)})"
    steps = contract.get("dmd_denoising_steps")
    return f"FastH3 student, {len(steps)} steps" if isinstance(steps, list) else "FastH3 student of unknown schedule"


def _without_contract(path: Path) -> str:
    for name in INDEX_FILES:
        index = _object(path / name)
        if index is not None:
            class_name = index.get("_class_name")
            return "base MiniMax-H3" if class_name == PIPELINE_CLASS else f"another model: {class_name}"
    if any((path / name).exists() for name in _LORA_FILES):
        return "a LoRA, not a checkpoint"
    if any(path.glob("*.safetensors")) and not any((path / name).is_dir() for name in _COMPONENTS):
        return "a single file of weights, not a checkpoint directory"
    return "not a FastH3 checkpoint"


def _precision(path: Path, component: str) -> str:
    config = (_object(path / component / "config.json") or {}).get("quantization_config")
    if not isinstance(config, dict):
        return "unknown"
    return str(config.get("quant_algo") or config.get("quant_method") or "unknown")


def _object(path: Path) -> dict[str, object] | None:
    try:
        return read_json_object(path)
    except (CheckpointError, CheckpointUnreadable):
        return None
