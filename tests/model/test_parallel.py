from functools import cache
from pathlib import Path

import pytest
import torch
from rushes_kernels.scaled_linear import E4M3
from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.parallel import SequenceParallel
from support.oracle import diffusers_transformer, student_weights
from support.parallel import run_ranks
from support.ranks import denoise, die_on_the_last_rank, exercise_collectives, take_own_rows_before_others_send
from support.tiny_model import Clip, tiny_config
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

# prompts from one token to past two tiles, on grids whose last boxes are ragged and whose row counts are odd; the last
# clip has fewer rows than eight ranks
CLIPS = [
    Clip(1, 2, 6, 10, 14),
    Clip(7, 9, 5, 18, 10),
    Clip(63, 33, 9, 14, 6),
    Clip(64, 1, 2, 6, 6),
    Clip(130, 5, 3, 10, 2),
    Clip(2, 1, 1, 2, 2),
]
SPARSITY = 0.5
STEPS = 2


class TestShares:
    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    @pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 38_711])
    def test_rows_are_dealt_once_and_in_order(self, size: int, num_rows: int) -> None:
        runs = [SequenceParallel(rank, size, "cpu").own_rows(num_rows) for rank in range(size)]
        assert [row for run in runs for row in range(run.start, run.stop)] == list(range(num_rows))
        assert max(run.stop - run.start for run in runs) == -(-num_rows // size)

    def test_heads_are_dealt_evenly(self) -> None:
        assert [SequenceParallel(rank, 4, "cpu").own_heads(56) for rank in (0, 3)] == [slice(0, 14), slice(42, 56)]

    def test_ranks_must_divide_the_heads(self) -> None:
        expected = "56 attention heads cannot be split over 3 ranks: their number must be one of 1, 2, 4, 7, 8, 14"
        with pytest.raises(ValueError, match=expected):
            SequenceParallel(0, 3, "cpu").own_heads(56)

    @pytest.mark.parametrize("count", [0, 1, 5, 8, 25_600])
    def test_uneven_shares_are_dealt_once_and_in_order(self, count: int) -> None:
        shares = [SequenceParallel(rank, 7, "cpu").own_share(count) for rank in range(7)]
        assert [one for share in shares for one in range(share.start, share.stop)] == list(range(count))
        assert max(share.stop - share.start for share in shares) == -(-count // 7)

    def test_rank_must_be_below_size(self) -> None:
        with pytest.raises(ValueError, match=r"0\.\.1, got 2"):
            SequenceParallel(2, 2, "cpu")


@pytest.mark.parametrize("num_rows", [7, 2])
def test_collectives_of_three_ranks(num_rows: int) -> None:
    for rank, seen in enumerate(run_ranks(exercise_collectives, 3, num_rows)):
        assert torch.equal(seen["gathered"], seen["whole"])
        assert all(torch.equal(traded, seen["expected_trade"]) for traded in seen["traded"])
        assert torch.equal(seen["landed"], seen["whole"])
        assert seen["added_up"].tolist() == [1.0] * 4
        assert seen["passed_on"].tolist() == [(rank - 1) % 3] * 4
        assert seen["any"] == [False, True]


def test_own_rows_do_not_wait_for_the_others(tmp_path: Path) -> None:
    assert run_ranks(take_own_rows_before_others_send, 2, tmp_path / "flag") == [3, 3]


def test_a_dead_rank_ends_the_others_at_once() -> None:
    with pytest.raises(ProcessException):
        run_ranks(die_on_the_last_rank, 2)


@cache
def student(num_heads: int) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """A tiny transformer, and its weights."""
    config = tiny_config(num_attention_heads=num_heads)
    return config, student_weights(diffusers_transformer(config), gate_scale=0.2)


@cache
def denoised_alone(num_heads: int) -> tuple[list[tuple[Tensor, Tensor]], dict[str, int]]:
    """What one rank makes of `CLIPS`."""
    config, weights = student(num_heads)
    with torch.inference_mode():
        return denoise(SequenceParallel.single(), weights, CLIPS, SPARSITY, STEPS, config)


# the numbers of ranks that the released 56 heads can be split over
@pytest.mark.parametrize(("size", "num_heads"), [(2, 4), (4, 4), (7, 56), (8, 56)])
def test_every_number_of_ranks_denoises_the_same_latents(size: int, num_heads: int) -> None:
    config, weights = student(num_heads)
    expected, all_read = denoised_alone(num_heads)
    ranks = run_ranks(denoise, size, weights, CLIPS, SPARSITY, STEPS, config)
    for latents, read in ranks:
        for clip, mine, single in zip(CLIPS, latents, expected, strict=True):
            for a, b in zip(mine, single, strict=True):
                # summation order of products of other widths, fed back through the solver
                torch.testing.assert_close(a, b, atol=1e-4, rtol=0, msg=lambda text, clip=clip: f"{clip}: {text}")
        for name, count in all_read.items():
            is_sharded = "transformer_blocks" in name and name.endswith(
                ("to_q.weight", "to_k.weight", "to_v.weight", "to_gate_compress.weight")
            )
            assert read[name] == (count // size if is_sharded else count), name
    first, *others = (latents for latents, _ in ranks)
    for latents in others:
        assert all(torch.equal(a, b) for x, y in zip(first, latents, strict=True) for a, b in zip(x, y, strict=True))


def test_ranks_denoise_the_same_latents_in_8_bits() -> None:
    config, weights = student(4)
    [clip, *_] = CLIPS
    with torch.inference_mode():
        (in_fp32,), _ = denoise(SequenceParallel.single(), weights, [clip], SPARSITY, 1, config)
        (alone,), _ = denoise(SequenceParallel.single(), weights, [clip], SPARSITY, 1, config, E4M3)
    for (mine,), _ in run_ranks(denoise, 2, weights, [clip], SPARSITY, 1, config, E4M3):
        for a, b, c in zip(mine, alone, in_fp32, strict=True):
            rounding = float((b - c).norm())
            # sums that differ in their last bit may fall to neighbouring values of e4m3, rarely
            assert float((a - b).norm()) < 0.1 * rounding
            assert rounding < 0.05 * float(c.norm())
