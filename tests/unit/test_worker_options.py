import pytest
from rushes_core.captures import CaptureShape, parse_capacities
from rushes_core.settings import Settings
from rushes_kernels.providers import Provider
from rushes_worker.pipeline.options import ATTENTION, PipelineOptions, revision_of, seed_of
from rushes_worker.pixels import PixelFormat


def test_options_are_read_by_name() -> None:
    assert PipelineOptions.parse([]) == PipelineOptions(attention=None, synthetic_seed=None)
    chosen = PipelineOptions.parse(["attention=triton", "weights=synthetic:7", "precision=fp8"])
    assert chosen == PipelineOptions(attention="triton", synthetic_seed=7, precision="fp8")


def test_pixels_are_decided_by_the_device_unless_they_are_named() -> None:
    assert PipelineOptions().pixels is None
    assert PipelineOptions.parse(["pixels=yuv420p"]).pixels is PixelFormat.YUV420P
    with pytest.raises(ValueError, match="pixels must be one of rgb24, yuv420p, got 'nv12'"):
        PipelineOptions.parse(["pixels=nv12"])


def test_precision_is_bf16_unless_it_is_named() -> None:
    assert PipelineOptions().precision == "bf16"
    with pytest.raises(ValueError, match="precision must be one of bf16, fp8, got 'int8'"):
        PipelineOptions.parse(["precision=int8"])


def test_shapes_of_graphs_are_read_in_any_order() -> None:
    options = PipelineOptions.parse(["capture=480x480x107", "graph-bytes=5", "text-capacities=128,64"])
    assert options.text_capacities == (64, 128)
    assert options.captures == (CaptureShape(480, 480, 107, 64), CaptureShape(480, 480, 107, 128))
    assert options.graph_bytes == 5
    with pytest.raises(ValueError, match="text capacity 64 of 480x480x107x64 is not one of 1024, 4096, 10240"):
        PipelineOptions.parse(["capture=480x480x107x64"])


def test_graphs_are_by_default_what_the_settings_say() -> None:
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert PipelineOptions().text_capacities == parse_capacities(defaults["text_capacities"])
    assert PipelineOptions().graph_bytes == defaults["graph_bytes"]


def test_every_provider_of_attention_can_be_asked_for() -> None:
    assert tuple(Provider) == ATTENTION


@pytest.mark.parametrize("option", ["attentoin=triton", "weights=random", "weights=synthetic:", "weights=synthetic:-1"])
def test_what_is_no_option_is_refused_by_value(option: str) -> None:
    with pytest.raises(ValueError, match=option.partition("=")[2] or option):
        PipelineOptions.parse([option])


def test_one_who_misspells_an_option_is_told_all_there_are() -> None:
    with pytest.raises(ValueError, match="takes the options") as refused:
        PipelineOptions.parse(["graph_bytes=5"])
    for name in ("attention=", "precision=", "weights=", "pixels=", "text-capacities=", "capture=", "graph-bytes="):
        assert name in str(refused.value)


def test_seed_of_synthetic_weights_is_0_unless_it_is_said() -> None:
    assert (seed_of("synthetic"), seed_of("synthetic:12")) == (0, 12)


def test_synthetic_weights_are_named_as_what_is_served() -> None:
    assert revision_of(["attention=triton", "weights=synthetic:7"]) == "synthetic:7"
    assert revision_of(["attention=triton"]) is None
