# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of optimizers' kernels, and of optimizer state that is offloaded to the host."""

from collections.abc import Sequence

import torch
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team
from torch import Tensor

from stretto.execution import StateOptions
from stretto.memory import failures
from stretto.ops.symmetric import BLOCKS, symmetric_product
from stretto.optim.adamw_kernel import SMALL, AdamWTensors, launch
from stretto.optim.sparse import BitmapIndex
from stretto.optim.sparse.index import BitmapTable
from stretto.optim.sparse.masks import pack
from stretto.optim.state.store import OptimizerStateStore, StoredParameter
from stretto.train.bit_hash import multipliers
from stretto.train.stored_optimizer import NoRanks, adamw_update, build_store

ENTRIES = 6
_ADAMW = "optim.adamw_kernel._adamw", "optim.adamw_kernel._adamw_of_many"
_HASH = "train.bit_hash_kernel._add_hash"
_MIXED = tuple(f"optim.state.kernels.{name}" for name in ("_adamw_mixed", "_sgd_mixed", "_round", "_join", "_scale"))

_TRIANGLE = "ops.symmetric.multiply_triangle"
_PRUNED = tuple(f"optim.sparse.kernels.{name}" for name in ("_compress", "_expand", "_note_addresses"))


class AdamWCase(StressCase):
    """Steps of AdamW's kernels from one state, which must give the same bits each time: whole, and in parts."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._device = team.device
        self._numbers, self._parts = SMALL + 5000, 41 if team.is_cuda else 3
        self._gradients = [
            team.integers((self._numbers,), entry, team.rank, low=-50, high=50).float() / 16 for entry in range(ENTRIES)
        ]
        self._scale = torch.tensor(0.5, device=team.device)
        self._corrections = torch.tensor([0.25, 1.5, 0.875], device=team.device)
        self._expected = [self._step(entry) for entry in range(ENTRIES)]
        for entry, (parameter, *_) in enumerate(self._expected):
            if not all(map(torch.equal, self._expected[entry], self._step(entry, parts=self._parts))):
                raise AssertionError("the kernel of many parameters does another step than that of one")
            gradient = self._gradients[entry].double() * 0.5
            first, second = 0.1 + 0.25 * gradient, 0.0625 + 0.25 * gradient * gradient
            right = 0.875 - 0.25 * first / (second.sqrt() * 1.5 + 1e-3)
            if not torch.allclose(parameter.double(), right, atol=1e-5):
                raise AssertionError("AdamW's kernel does another step")

    def _step(self, entry: int, parts: int = 1) -> tuple[Tensor, ...]:
        parameter = torch.ones(self._numbers, device=self._device)
        first, second = torch.full_like(parameter, 2 / 15), torch.full_like(parameter, 1 / 12)
        copy = torch.empty(self._numbers, dtype=torch.bfloat16, device=self._device)
        options = {"betas": (0.75, 0.75), "eps": 1e-3}
        tensors = parameter, self._gradients[entry], first, second, copy
        updates = [AdamWTensors(*some) for some in zip(*[each.chunk(parts) for each in tensors], strict=True)]
        launch(
            updates,
            self._corrections.expand(parts, 3).contiguous(),
            self._scale,
            failures.failure_flag(self._device),
            options,
        )
        return parameter, first, second, copy

    def call(self, entry: int) -> Sequence[Check]:
        found = [*self._step(entry), *self._step(entry, parts=self._parts)]
        return [Check(*both) for both in zip(found, 2 * self._expected[entry], strict=True)]


class MixedPrecisionCase(StressCase):
    """Steps of AdamW and SGD on split bf16 weights from one state, which must give the same bits each time."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._device = team.device
        self._half = torch.tensor(0.5, device=team.device)  # here: graphs take no copies from the host
        self._corrections = torch.tensor([0.25, 1.5, 0.875], device=team.device)
        self._numbers = 5000 if team.is_cuda else 300
        self._wide = team.integers((self._numbers,), "weights", low=-1000, high=1000).float() / 1024
        self._gradients = [
            team.integers((self._numbers,), entry, team.rank, low=-50, high=50).half() / 16 for entry in range(ENTRIES)
        ]
        self._expected = [self._step(entry) for entry in range(ENTRIES)]
        for entry, (momentum, *_) in enumerate(self._expected):
            if not torch.allclose(momentum, self._gradients[entry].float() * 0.5 + 0.25 * self._wide + 0.5):
                raise AssertionError("SGD's kernel does another step")

    def _step(self, entry: int) -> tuple[Tensor, ...]:
        from stretto.optim.state import kernels

        weight = torch.empty(self._numbers, dtype=torch.bfloat16, device=self._device)
        low = torch.empty(self._numbers, dtype=torch.int16, device=self._device)
        first, second = (torch.ones(self._numbers, device=self._device) for _ in range(2))
        buffer, wide = torch.ones_like(first), torch.empty_like(first)
        kernels.launch_round(self._wide, weight, low)
        gradient = torch.empty_like(first)
        half, none = self._half, torch.zeros(1, dtype=torch.int32, device=self._device)
        failed = failures.failure_flag(self._device)
        kernels.launch_scale(self._gradients[entry], half, gradient)
        kernels.launch_sgd(
            weight, self._gradients[entry], buffer, low, lr=half, scale=half, skip=none, failed=failed,
            options=(0.5, 0.25),
        )  # fmt: skip
        kernels.launch(
            weight, gradient, first, second, low, corrections=self._corrections, scale=half, skip=none, failed=failed,
            options={"betas": (0.75, 0.75), "eps": 1e-3},
        )  # fmt: skip
        kernels.launch_join(weight, low, wide)
        return buffer, weight, low, first, second, wide

    def call(self, entry: int) -> Sequence[Check]:
        return [Check(found, right) for found, right in zip(self._step(entry), self._expected[entry], strict=True)]


class HostStateCase(StressCase):
    """Steps whose state is fetched from the host in small buckets and written back; all three overlap."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._numbers = 40_000 if team.is_cuda else 600
        self._wide = team.integers((self._numbers,), "weights", low=-1000, high=1000).float() / 1024
        self._gradients = [
            team.integers((self._numbers,), entry, team.rank, low=-50, high=50).bfloat16() / 16
            for entry in range(ENTRIES)
        ]
        self._stores = [
            self._build(team.device, StateOptions(location, bucket_size=64 * (50 if team.is_cuda else 1)))
            for location in ("host", "device")
        ]
        self._expected = [self._step(self._stores[1], entry) for entry in range(ENTRIES)]

    def _build(self, device: torch.device, options: StateOptions) -> OptimizerStateStore:
        parameter = StoredParameter("flat", self._wide.shape, (), 1, 0.0)
        make = adamw_update(betas=(0.75, 0.75), eps=1e-3)
        store = build_store([parameter], make, torch.bfloat16, options, device, NoRanks())
        store.set_weight(0, self._wide)
        store.prepare()
        return store

    def _step(self, store: OptimizerStateStore, entry: int) -> tuple[Tensor, ...]:
        """Two steps from one state; the second reads the state that the first has written back."""
        store.residence.synchronize()
        for array in store.slots(0).values():
            array.zero_()
        store.set_weight(0, self._wide)
        store.set_scalars({})
        for _ in range(2):
            store.add(0, self._gradients[entry])
            store.finish()
            store.step(0.25)
        store.residence.synchronize()
        return store.weights.flat.clone(), *(array.to(store.device, copy=True) for array in store.slots(0).values())

    def call(self, entry: int) -> Sequence[Check]:
        found = self._step(self._stores[0], entry)
        return [Check(one, right) for one, right in zip(found, self._expected[entry], strict=True)]


class PrunedWeightsCase(StressCase):
    """Numbers that are compressed, added up and expanded by a bitmap, of one tensor and of two at once: bits of
    indexing by the mask."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        count = 70_001 if team.is_cuda else 301
        mask = team.integers((count,), "mask", low=0, high=4) == 0
        self._index = BitmapIndex(pack(mask), count)
        self._dense = [
            team.integers((count,), entry, team.rank, low=-50, high=50).bfloat16() / 16 for entry in range(ENTRIES)
        ]
        self._expected = [(dense[mask] * 2, torch.where(mask, dense * 2, 0)) for dense in self._dense]
        self._both = [torch.zeros_like(self._dense[0]) for _ in range(2)]
        indices = [BitmapIndex(pack(mask), count) for _ in self._both]
        self._table = BitmapTable(indices, [0, indices[0].count], self._both)

    def call(self, entry: int) -> Sequence[Check]:
        dense, index = self._dense[entry], self._index
        left, wide = dense.new_empty(index.count), torch.zeros_like(dense)
        for adds in (False, True):
            index.launch_compress(dense, left, adds)
        index.launch_expand(left, wide, [])
        other = (entry + 1) % ENTRIES
        both = left.new_empty(self._table.stop)
        for adds in (False, True):
            self._table.compress({0: dense, 1: self._dense[other]}, both, adds=adds)
        self._table.expand(both, 0, self._table.stop)
        found = left, both[: len(left)], both[len(left) :], wide, *(each.clone() for each in self._both)
        (one, one_wide), (two, two_wide) = self._expected[entry], self._expected[other]
        return [Check(*pair) for pair in zip(found, (one, one, two, one_wide, one_wide, two_wide), strict=True)]


class SymmetricCase(StressCase):
    """Symmetric products of small integers, which are exact: those of torch in fp64."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        m, k = (1096, 513) if team.is_cuda else (40, 24)
        self._blocks = BLOCKS if team.is_cuda else BLOCKS._replace(m=16, n=16, k=16)
        self._inputs = [team.integers((m, k), entry, team.rank, low=-3, high=4).half() for entry in range(ENTRIES)]
        added = [team.integers((m, 1), entry, "added", low=-9, high=10).half() for entry in range(ENTRIES)]
        self._added = [one + one.T for one in added]
        pairs = zip(self._inputs, self._added, strict=True)
        self._expected = [(2 * a.double() @ a.double().T - added.double()).to(a.dtype) for a, added in pairs]

    def call(self, entry: int) -> Sequence[Check]:
        """Enqueue the call with input number `entry`, and pair its result with the expected one."""
        found = symmetric_product(
            self._inputs[entry], alpha=2.0, added=self._added[entry], beta=-1.0, blocks=self._blocks
        )
        return [Check(found, self._expected[entry])]


class HashCase(StressCase):
    """Hashes of words of 4, 2 and 1 bytes (`train.verify_steps`), which must be those of torch's operators."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._device = team.device
        count = 70_001 if team.is_cuda else 301
        dtypes = (torch.int32, torch.int16, torch.uint8)
        self._words, self._expected = [], []
        for entry in range(ENTRIES):
            dtype = dtypes[entry % len(dtypes)]
            numbers = torch.iinfo(dtype)
            words = team.integers((count,), "words", entry, team.rank, low=numbers.min, high=numbers.max).to(dtype)
            self._words.append(words)
            right = (words.cpu().long() * multipliers(0, count)).sum()
            self._expected.append(right.to(team.device).view(1))

    def call(self, entry: int) -> Sequence[Check]:
        from stretto.train import bit_hash_kernel

        total = torch.zeros(1, dtype=torch.int64, device=self._device)
        bit_hash_kernel.launch(self._words[entry], total)
        return [Check(total, self._expected[entry])]


def list_configurations() -> list[Configuration]:
    return [
        Configuration("weights/hash", "optimizer", (_HASH,), "hashes that replicas compare", HashCase),
        Configuration("optimizer/pruned", "optimizer", _PRUNED, "compressed, added up and expanded", PrunedWeightsCase),
        Configuration("optimizer/symmetric", "optimizer", (_TRIANGLE,), "half of a symmetric product", SymmetricCase),
        Configuration("optimizer/adamw", "optimizer", _ADAMW, "one kernel a parameter, one for many", AdamWCase),
        Configuration(
            "optimizer/mixed", "optimizer", _MIXED, "AdamW and SGD on split bf16 weights", MixedPrecisionCase
        ),
        Configuration(
            "optimizer/host",
            "optimizer",
            _MIXED[:1],
            "state on the host, many small buckets",
            HostStateCase,
            takes_graphs=False,
        ),
    ]
