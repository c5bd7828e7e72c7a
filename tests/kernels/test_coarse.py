import torch
from rushes_kernels.coarse import coarse_means, score_tiles


def test_tiles_are_scored_and_averaged_by_head() -> None:
    q, k, v = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    scores = score_tiles(q, k, 0.3)
    means = coarse_means(scores, v)
    for head in range(2):
        expected = torch.tensor([[0.3 * float(a.dot(b)) for b in k[head]] for a in q[head]])
        torch.testing.assert_close(scores[head], expected)
        weights = expected.exp() / expected.exp().sum(1, keepdim=True)
        torch.testing.assert_close(means[head], weights @ v[head])
