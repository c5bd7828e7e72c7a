"""Work whose capture in a CUDA graph fails."""

import torch
from rushes_worker.pipeline.graphs import Graphs
from structlog.testing import capture_logs
from torch import Tensor


def add(x: Tensor, amount: float) -> None:
    """Through temporary memory."""
    x.add_(torch.full_like(x, amount))


def run_after(fault: str) -> None:
    """Run work whose capture fails by `fault`, then work that can be captured, and check that all of it was done."""
    device = torch.device("cuda:0")
    torch.cuda.set_stream(torch.cuda.Stream(device))
    graphs = Graphs(device, max_bytes=1 << 30)
    x = torch.zeros(1000, device=device)

    def faulty() -> None:
        add(x, 1.0)
        if torch.cuda.is_current_stream_capturing():
            if fault == "wait":
                x.sum().item()
            elif fault == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device=device)
            else:
                raise RuntimeError("no")

    for _ in range(4):
        graphs.run("faulty", faulty)
    assert graphs.num_graphs == 0
    assert x.unique().tolist() == [4.0]
    for count in (5.0, 6.0, 7.0):
        graphs.run("sound", lambda: add(x, 1.0))
        assert x.unique().tolist() == [count]
    # torch cannot capture any more once a capture broke off
    assert graphs.num_graphs == (0 if fault == "wait" else 1)


def run_without_keeper() -> None:
    """Run work that can be captured in a pool whose keeper cannot, and check that it was done without a graph, and why
    by the log."""
    device = torch.device("cuda:0")
    torch.cuda.set_stream(torch.cuda.Stream(device))
    graphs = Graphs(device, max_bytes=1 << 30)
    x = torch.zeros(1000, device=device)

    def refuse() -> None:
        raise RuntimeError("no")

    graphs._do_nothing = refuse  # type: ignore[method-assign]
    with capture_logs() as told:
        for _ in range(3):
            graphs.run("sound", lambda: add(x, 1.0))
    assert graphs.num_graphs == 0
    assert x.unique().tolist() == [3.0]
    refused = [(one["graph"], one["needed_for"], one["error"]) for one in told if one["event"] == "graph_not_captured"]
    assert refused == [("the keeper of the pool", "sound", "no")]
