"""Launches of a step on the code path of a GPU, counted as dispatched operations and launched Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from benchmarks.gpu import launches
from benchmarks.gpu.launches import SAMPLING, Counting, count_launches
from benchmarks.gpu.models import Ours
from benchmarks.gpu.sizes import TINY, ModelSize
from benchmarks.gpu.steps import Steps

from fastgen.kernels.gpu import transfers
from fastgen.kernels.gpu.elementwise import gated_activation
from fastgen.kernels.gpu.experts import experts, route_experts
from fastgen.kernels.gpu.int4 import BLOCK as INT4_BLOCK
from fastgen.kernels.gpu.int4 import packed_integers
from fastgen.model.checkpoint.checkpoint import StoredTensor
from fastgen.model.layers import moe
from fastgen.model.layers.float8_linear import Float8Linear
from fastgen.model.layers.gpu_backend import GPUFormat
from fastgen.model.layers.int4_linear import Int4Linear
from fastgen.model.layers.linear import Linear, PlainLinear
from fastgen.model.layers.rank_group import ONE_RANK
from fastgen.model.layers.torch_backend import TorchFormat

MOST_PER_LAYER = 9
MOST_PER_CHUNK = 1  # more in a layer of a step of over 64 tokens: the attention of its chunks
# Beside the six launches around it: the router's product, the choice of experts, two to sort their tokens, two products
# for all experts, and the sum. A shared expert adds its MLP of three, its gate of two, a product and a sum.
MOST_PER_MIXTURE, MOST_OF_SHARED_EXPERT = 13, 7
MOST_OUTSIDE = 20
PRODUCTS_OF_A_LAYER = 4  # queries, keys and values; the attention's output; gate and up; down
# The upload, the graph of the forward pass, that of the head and the sampler, and the copy of the tokens to the host.
MOST_REPLAYED = 4
# More on several ranks: two sums a layer; to resolve, look up and sum the embeddings; for the logits and the tokens.
MOST_OF_RANKS_PER_LAYER, MOST_OF_RANKS_OUTSIDE = 2, 14
MOST_OF_RANKS_SAMPLING = 2  # the logits and the tokens
MOST_OF_OWN_EXPERTS = 3  # more in a layer's mixture, to find the pairs of the rank's experts
MOST_REPLAYED_WITH_LISTS = 9  # instead of the second graph the head and five kernels of the sampler

# Qwen2's mixtures have a shared expert, and a bias that is added to queries, keys and values.
SHARED_EXPERT = replace(
    TINY.mixture,
    config={name: value for name, value in TINY.mixture.config.items() if name != "head_dim"}
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24},
)


@pytest.fixture(autouse=True)
def sigmoid_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute sigmoids in one launch, as on a GPU: the simulated one has its tensors on the CPU."""
    monkeypatch.setattr(moe, "_sigmoid", torch.sigmoid)


@pytest.mark.parametrize(
    ("size", "most_per_layer"),
    [
        pytest.param(TINY.small, MOST_PER_LAYER, id="dense"),
        pytest.param(TINY.mixture, MOST_PER_MIXTURE, id="mixture"),
        pytest.param(SHARED_EXPERT, MOST_PER_MIXTURE + MOST_OF_SHARED_EXPERT + 1, id="shared expert and bias"),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_mixed_step_stays_within_its_launches_and_waits_for_nothing(
    sampling: str, size: ModelSize, most_per_layer: int
) -> None:
    counted = count_launches(SAMPLING[sampling], size)
    assert counted.per_layer <= most_per_layer
    assert counted.outside <= MOST_OUTSIDE
    assert counted.replayed <= (MOST_REPLAYED_WITH_LISTS if "penalty" in sampling else MOST_REPLAYED)
    assert not counted.waits


class CountedGroup:
    """Two ranks, seen from one of them. Each operation counts as one launch, and sums or sends nothing."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.neg_()

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x.new_ones(len(x), 0 if self.rank else sum(widths))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.zero_()

    def agree(self, value: int) -> int:
        return value


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    ("size", "most_per_layer"),
    [
        pytest.param(TINY.small, MOST_PER_LAYER, id="dense"),
        pytest.param(TINY.mixture, MOST_PER_MIXTURE + MOST_OF_OWN_EXPERTS, id="mixture"),
    ],
)
def test_several_ranks_launch_two_sums_a_layer_more(
    sampling: str, size: ModelSize, most_per_layer: int, rank: int
) -> None:
    """In a replayed step they are in the graphs."""
    alone, counted = (count_launches(SAMPLING[sampling], size, group=group) for group in (ONE_RANK, CountedGroup(rank)))
    own = most_per_layer - (MOST_PER_LAYER if size is TINY.small else MOST_PER_MIXTURE)
    assert counted.per_layer == alone.per_layer + MOST_OF_RANKS_PER_LAYER + own
    assert counted.outside <= MOST_OUTSIDE + MOST_OF_RANKS_OUTSIDE
    assert counted.replayed <= (
        MOST_REPLAYED_WITH_LISTS + MOST_OF_RANKS_SAMPLING if "penalty" in sampling else MOST_REPLAYED
    )
    assert not counted.waits


def _quantising(quantised: Callable[[torch.Tensor], Linear]) -> Callable[..., Linear]:
    """Return a `GPUFormat.linear` that quantises every matrix of the layers."""

    def linear(weights: GPUFormat, parts: Sequence[StoredTensor]) -> Linear:
        product = TorchFormat.linear(weights, parts)
        assert isinstance(product, PlainLinear)
        return quantised(product.weight)

    return linear


def _float8(weight: torch.Tensor) -> Linear:
    return Float8Linear(weight.to(torch.float8_e4m3fn), torch.ones(len(weight)))


def _int4(weight: torch.Tensor) -> Linear:
    integers = torch.full_like(weight, 3).int()
    scales, offsets = torch.full((2, len(weight), weight.shape[1] // INT4_BLOCK), 0.01)
    return Int4Linear(packed_integers(integers), scales, offsets, None)


@pytest.mark.parametrize("quantised", [_float8, _int4])
@pytest.mark.parametrize("chunk", [20, 100])
def test_a_quantised_product_is_one_launch_more(
    chunk: int, quantised: Callable[[torch.Tensor], Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """float8 quantises its rows first; 4-bit integers are multiplied in parts, or dequantised first."""
    # Rows and columns of every product are multiples of a group.
    size = replace(TINY.small, config=TINY.small.config | {"intermediate_size": 64})
    plain = count_launches(SAMPLING["greedy"], size, chunk)
    monkeypatch.setattr(GPUFormat, "linear", _quantising(quantised))
    counted = count_launches(SAMPLING["greedy"], size, chunk)
    assert counted.per_layer == plain.per_layer + PRODUCTS_OF_A_LAYER
    assert (counted.outside, counted.replayed) == (plain.outside, plain.replayed)
    assert not counted.waits


def test_a_step_of_many_tokens_has_one_more_launch_a_layer() -> None:
    few, many = (count_launches(SAMPLING["greedy"], chunk=chunk) for chunk in (62, 63))
    assert many.per_layer <= MOST_PER_LAYER + MOST_PER_CHUNK
    assert (many.per_layer - few.per_layer, many.outside, many.replayed) == (1, few.outside, few.replayed)
    assert not many.waits


def test_the_work_of_attention_is_listed_once_for_each_window_of_a_step() -> None:
    config = TINY.small.config | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20}
    windows = replace(TINY.small, config=config | {"use_sliding_window": True, "num_hidden_layers": 4})
    for size, lists in ((TINY.small, 1), (windows, 2)):
        ours = Ours.make(size, TINY.block_size, 4, torch.device("cpu"), torch.float32)
        step = Steps(ours, [(1, 30), (20, 30)]).step
        with torch.inference_mode(), Counting() as counting:
            ours.runner.launch(step)
        assert counting.launches["_list_work"] == lists
        assert counting.launches["paged_attention_kernel"] == ours.model.architecture.num_layers


def test_waits_and_launches_are_told_from_views_and_allocations() -> None:
    with Counting() as counting:
        total = torch.empty(4, 3).zero_().view(12)[2:].sum()
        total.item()
        total.tolist()
        total.cpu().numpy()
    assert counting.launches == {"zero_": 1, "sum": 1}
    assert counting.waits == {"_local_scalar_dense": 1, "tolist": 1, "cpu": 1, "numpy": 1}


def test_an_operator_counts_as_the_kernels_that_it_launches() -> None:
    torch.manual_seed(0)
    operands = torch.randn(5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    with Counting() as counting:
        weights, ids = route_experts(operands[0] @ torch.randn(8, 4), 2, True)
        experts(*operands, weights, ids, "silu")
        gated_activation(torch.randn(3, 8), "silu")
    kernels = {name: count for name, count in counting.launches.items() if name.startswith("_")}
    of_mixture = ("_route_experts", "_count_pairs", "_sort_pairs", "_gate_up", "_down", "_sum_shares")
    assert kernels == dict.fromkeys((*of_mixture, "_gated_activation"), 1)
    assert not counting.waits, "nothing waits for the routing"


def test_arrays_of_a_step_are_uploaded_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pin, pinning, made, unpinned = transfers._pinned, [False], [0], [0]

    def pin_and_record(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        pinning[0] = True
        tensor = pin(values, device)
        pinning[0] = False
        return tensor

    class HostTensors(Counting):
        """Counts the tensors made of arrays or numbers of the host."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.lift_fresh.default:
                made[0] += 1
                unpinned[0] += not pinning[0]
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(transfers, "_pinned", pin_and_record)
    monkeypatch.setattr(launches, "Counting", HostTensors)
    count_launches(replace(SAMPLING["filters and a penalty"], logprobs=2))
    assert made[0] > 0
    assert unpinned[0] == 0


def test_an_upload_to_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    transfers._pinned(np.zeros(3), torch.device("cuda"))
    assert len(pinned) == 1
    transfers._pinned(np.zeros(3), torch.device("cpu"))
    assert len(pinned) == 1
