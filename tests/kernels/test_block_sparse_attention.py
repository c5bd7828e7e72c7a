import pytest
import torch
import torch.nn.functional as F
from rushes_kernels.block_sparse_attention import block_sparse_attention, block_sparse_attention_ref, check_lists
from rushes_kernels.nvrtc import KernelError
from rushes_kernels.providers import Provider, choose_provider
from rushes_kernels.video_sparse_attention import prepare_video_sparse_attention
from support.tile_lists import Problem

CPU = torch.device("cpu")


class TestReference:
    def test_every_query_tile_sees_the_prefix_and_its_list(self) -> None:
        problem = Problem.random(heads=2, num_prefix_tiles=2, counts=[0, 1, 3, 5, 2], places=4, dim=8, device="cpu")
        out = problem.reference()
        for head in range(2):
            for tile in range(7):
                torch.testing.assert_close(out[head, tile], problem.expected_tile(head, tile))

    def test_all_tiles_listed_is_dense_attention(self) -> None:
        problem = Problem.random(heads=2, num_prefix_tiles=1, counts=[3] * 3, places=4, dim=8, device="cpu")
        problem.sizes[:] = 4
        problem.k, problem.v = problem.k.clamp(max=3), problem.v.clamp(max=3)
        dense = F.scaled_dot_product_attention(*(x.flatten(1, 2) for x in (problem.q, problem.k, problem.v)))
        torch.testing.assert_close(problem.reference().flatten(1, 2), dense)

    def test_empty_list_without_prefix_is_zero(self) -> None:
        problem = Problem.random(heads=1, num_prefix_tiles=0, counts=[0, 2], places=4, dim=8, device="cpu")
        out = problem.reference()
        assert (out[0, 0] == 0).all()
        assert (out[0, 1] != 0).all()


class TestCheckLists:
    def check(self, lists: list[int], count: int) -> None:
        check_lists(
            torch.tensor([[lists]], dtype=torch.int32),
            torch.tensor([[count]], dtype=torch.int32),
            num_prefix_tiles=2,
            num_tiles=6,
        )

    def test_what_does_not_count_may_be_anything(self) -> None:
        self.check([5, 2, 3, 5, -9], 3)
        self.check([7, 7], 0)

    def test_tile_named_twice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must not name a tile twice, got 5 twice"):
            self.check([5, 3, 5], 3)

    @pytest.mark.parametrize("tile", [-1, 1, 6])
    def test_tile_out_of_range_is_refused(self, tile: int) -> None:
        with pytest.raises(ValueError, match=f"must be in 2..5, got {tile}"):
            self.check([3, tile], 2)

    @pytest.mark.parametrize("count", [-1, 3])
    def test_count_out_of_range_is_refused(self, count: int) -> None:
        with pytest.raises(ValueError, match=rf"counts must be in 0\.\.2, got {count}"):
            self.check([3, 4], count)


class TestChooseProvider:
    def test_the_cpu_computes_in_pytorch(self) -> None:
        assert choose_provider("cpu", dtype=torch.float32, head_dim=128) is Provider.TORCH

    @pytest.mark.parametrize(
        ("capability", "dtype", "head_dim", "expected"),
        [
            ((9, 0), torch.bfloat16, 128, Provider.HOPPER),
            ((9, 0), torch.float32, 128, Provider.TRITON),
            ((9, 0), torch.bfloat16, 64, Provider.TRITON),
            ((8, 9), torch.bfloat16, 128, Provider.TRITON),
            ((10, 0), torch.bfloat16, 128, Provider.TRITON),
            ((9, 0), torch.bfloat16, 100, Provider.TORCH),
        ],
    )
    def test_rule_for_cuda_devices(
        self,
        capability: tuple[int, int],
        dtype: torch.dtype,
        head_dim: int,
        expected: Provider,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        assert choose_provider("cuda", dtype=dtype, head_dim=head_dim) is expected

    def test_missing_triton_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ValueError, match="triton is not installed; install it or ask for torch"):
            choose_provider("cuda", dtype=torch.bfloat16, head_dim=128)
        assert choose_provider("cuda", dtype=torch.bfloat16, head_dim=128, wanted="torch") is Provider.TORCH

    def test_what_triton_cannot_be_built_with_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rushes_kernels.video_sparse_attention.can_build_triton", lambda: False)
        with pytest.raises(KernelError, match="Triton needs a C compiler, Python's headers and a cache"):
            prepare_video_sparse_attention(Provider.TRITON, "cpu", dtype=torch.float32, head_dim=16)

    @pytest.mark.parametrize("wanted", [Provider.HOPPER, Provider.TRITON])
    def test_provider_that_cannot_serve_is_refused(self, wanted: Provider) -> None:
        with pytest.raises(ValueError, match=f"{wanted} cannot serve: it needs a CUDA device, got cpu"):
            choose_provider("cpu", dtype=torch.bfloat16, head_dim=128, wanted=wanted)

    def test_unknown_provider_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'cutlass' is not one of hopper, triton, torch"):
            choose_provider("cpu", dtype=torch.bfloat16, head_dim=128, wanted="cutlass")


class TestArguments:
    def test_wrong_shapes_types_and_layouts_are_refused(self) -> None:
        def run(**changes: object) -> None:
            problem = Problem.random(heads=2, num_prefix_tiles=1, counts=[2, 1], places=16, dim=16, device="cpu")
            for name, value in changes.items():
                setattr(problem, name, value(getattr(problem, name)))  # type: ignore[operator]
            problem.run(Provider.HOPPER)

        for field, change, message in [
            ("k", lambda x: x[:, :2], "k must be like q"),
            ("v", lambda x: x.bfloat16(), "v must be like q"),
            ("lists", lambda x: x.long(), r"lists must be \(2, 2, 2\) int32"),
            ("counts", lambda x: x[:, :1], r"counts must be \(2, 2\) int32"),
            ("sizes", lambda x: x.float(), r"sizes must be \(3,\) int32"),
            ("q", lambda x: x.transpose(2, 3), "contiguous"),
            ("num_prefix_tiles", lambda x: 4, r"in 0\.\.3, got 4"),
        ]:
            with pytest.raises(ValueError, match=message):
                run(**{field: change})

    def test_plain_pytorch_is_no_provider_of_it(self) -> None:
        problem = Problem.random(heads=1, num_prefix_tiles=1, counts=[0], places=16, dim=16, device="cpu")
        with pytest.raises(ValueError, match="no provider torch"):
            problem.run(Provider.TORCH)

    def test_checked_lists_are_read_first(self) -> None:
        problem = Problem.random(heads=1, num_prefix_tiles=1, counts=[2, 2], places=16, dim=16, device="cpu")
        problem.lists[:] = 1
        with pytest.raises(ValueError, match="twice"):
            problem.run(Provider.HOPPER, check=True)

    def test_reference_agrees_with_the_arguments_of_the_op(self) -> None:
        assert block_sparse_attention_ref.__annotations__.keys() < block_sparse_attention.__annotations__.keys()
