import pytest
from rushes_worker.pipeline.options import PipelineOptions, revision_of, seed_of


def test_options_are_read_by_name() -> None:
    assert PipelineOptions.parse([]) == PipelineOptions(attention=None, synthetic_seed=None)
    assert PipelineOptions.parse(["attention=triton", "weights=synthetic:7"]) == PipelineOptions("triton", 7)


@pytest.mark.parametrize("option", ["attentoin=triton", "weights=random", "weights=synthetic:", "weights=synthetic:-1"])
def test_what_is_no_option_is_refused_by_value(option: str) -> None:
    with pytest.raises(ValueError, match=option.partition("=")[2] or option):
        PipelineOptions.parse([option])


def test_seed_of_synthetic_weights_is_0_unless_it_is_said() -> None:
    assert (seed_of("synthetic"), seed_of("synthetic:12")) == (0, 12)


def test_synthetic_weights_are_named_as_what_is_served() -> None:
    assert revision_of(["attention=triton", "weights=synthetic:7"]) == "synthetic:7"
    assert revision_of(["attention=triton"]) is None
