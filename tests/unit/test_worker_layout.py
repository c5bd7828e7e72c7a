import pytest
from rushes_worker.layout import Layout


@pytest.mark.parametrize(
    ("text", "replicas", "sp"),
    [("r1s1", 1, 1), ("r2s4", 2, 4), ("r1s7", 1, 7), ("r1s8", 1, 8), ("r8s1", 8, 1), ("r04s2", 4, 2)],
)
def test_layout_is_read(text: str, replicas: int, sp: int) -> None:
    layout = Layout.parse(text)
    assert (layout.replicas, layout.sp, layout.num_ranks) == (replicas, sp, replicas * sp)
    assert str(layout) == f"r{replicas}s{sp}"


@pytest.mark.parametrize("text", ["", "r1", "s1", "1x1", "R1S1", "r1s1 ", "r-1s1", "r1s1s1", "r²s1", "r1000s1"])
def test_what_is_no_layout_is_refused_by_value(text: str) -> None:
    with pytest.raises(ValueError, match="expected rRsS") as refusal:
        Layout.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("sp", [0, 3, 5, 6, 9, 14, 56])
def test_degree_that_cannot_split_the_heads_is_refused(sp: int) -> None:
    with pytest.raises(ValueError, match=rf"must be one of 1, 2, 4, 7, 8.*got {sp}"):
        Layout.parse(f"r1s{sp}")


@pytest.mark.parametrize("replicas", [0, 65])
def test_number_of_replicas_is_bounded(replicas: int) -> None:
    with pytest.raises(ValueError, match=rf"replicas must be in 1..64, got {replicas}"):
        Layout.parse(f"r{replicas}s1")


def test_two_nodes_run_half_of_the_ranks_each() -> None:
    assert [Layout.parse(text).ranks_per_node(2) for text in ("r1s2", "r1s8")] == [1, 4]
    assert Layout.parse("r2s4").ranks_per_node(1) == 8


@pytest.mark.parametrize(("layout", "nodes"), [("r1s7", 2), ("r1s1", 2), ("r2s4", 2), ("r1s8", 3), ("r1s8", 0)])
def test_layout_that_nodes_cannot_share_is_refused(layout: str, nodes: int) -> None:
    with pytest.raises(ValueError, match=r"one replica of an even number of ranks|nodes must be 1 or 2, got"):
        Layout.parse(layout).ranks_per_node(nodes)
