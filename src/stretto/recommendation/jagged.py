# SPDX-License-Identifier: Apache-2.0
"""Jagged inputs and keyed outputs of embedding collections: stand-ins for TorchRec's classes of the same names.

`KeyedJaggedTensor` has bags of ids of several features, `JaggedTensor` those (or the rows) of one, and `KeyedTensor`
the pooled vectors. Constructors, methods and results are those of torchrec.sparse.jagged_tensor, so that a script runs
with the import changed. `select_features` and `result_type` also take torchrec's own objects.

Left out: a batch size of each feature's own (`stride_per_key_per_rank`) and a key given twice, which raise a
ValueError, and torch.jit.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map

from stretto.suggestions import did_you_mean


def _to_offsets(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


class _Tensors:
    """A holder of tensors on one device."""

    _values: Tensor

    def device(self) -> torch.device:
        """The values' device."""
        return self._values.device

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """A copy on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy in pinned memory."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """Keep the tensors' memory until the stream's work so far has ended."""
        self._map(lambda tensor: tensor.record_stream(stream))

    def _map(self, function: Callable[[Tensor], Any]) -> Self:
        return tree_map(lambda tensor: function(tensor) if isinstance(tensor, Tensor) else tensor, self)


class _Jagged(_Tensors):
    """Values, which may have weights, in slices that either lengths or offsets describe; the other is made on demand.

    values, weights: [total, ...]. lengths: [slices], offsets: [slices + 1], or [0] for no slices; int32 or int64.
    """

    def __init__(self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None) -> None:
        kind = type(self).__name__
        if lengths is None and offsets is None:
            raise ValueError(f"{kind} takes lengths or offsets, and was given neither")
        for name, tensor in (("lengths", lengths), ("offsets", offsets)):
            if tensor is not None and tensor.numel() and tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{kind}: {name} are {tensor.dtype}, but must be int32 or int64")
        if weights is not None and len(weights) != len(values):
            raise ValueError(f"{kind} has {len(values)} values and {len(weights)} weights: give one for each")
        self._values, self._weights, self._offsets = values, weights, offsets
        self._lengths = None if lengths is None else lengths.flatten()  # torchrec takes [keys, batch], too

    def values(self) -> Tensor:
        """The values of all slices, one after another."""
        return self._values

    def weights(self) -> Tensor:
        """The values' weights. ValueError without weights."""
        if self._weights is None:
            raise ValueError(f"this {type(self).__name__} has no weights: pass weights= when you make it")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The values' weights, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """The slices' lengths."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def offsets(self) -> Tensor:
        """The offsets at which slices begin, and the one at which the last ends."""
        if self._offsets is None:
            self._offsets = _to_offsets(self.lengths())
        return self._offsets

    def lengths_or_none(self) -> Tensor | None:
        """The slices' lengths, or None if they have not been asked for."""
        return self._lengths

    def offsets_or_none(self) -> Tensor | None:
        """The offsets at which slices begin, or None if that has not been asked for."""
        return self._offsets


def _as_json(value: Any, indent: str = "") -> str:
    if not isinstance(value, dict):
        return str(value)
    inner = f"{indent}    "
    lines = ",\n".join(f'{inner}"{key}": {_as_json(part, inner)}' for key, part in value.items())
    return f"{{\n{lines}\n{indent}}}"


class JaggedTensor(_Jagged):
    """Slices of one feature: [values of sample 0], [values of sample 1], ..."""

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> "JaggedTensor":
        """Make it of a tensor for each slice."""
        joined = torch.cat([*values])
        lengths = torch.tensor([len(value) for value in values], dtype=torch.int32, device=joined.device)
        return JaggedTensor(joined, None if weights is None else torch.cat([*weights]), lengths)

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """Make it of the first numbers of each row, as many as lengths say; values and weights: [slices, longest]."""
        is_there = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor(values[is_there], None if weights is None else weights[is_there], lengths)

    @staticmethod
    def empty(is_weighted: bool = False, device: torch.device | None = None) -> "JaggedTensor":
        """Without slices."""
        none, places = torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device)
        return JaggedTensor(none, none if is_weighted else None, places, places)

    def to_dense(self) -> list[Tensor]:
        """A tensor for each slice."""
        return [self._values[start:stop] for start, stop in pairwise(self.offsets().tolist())]

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of each slice, or None without weights."""
        return None if self._weights is None else JaggedTensor(self._weights, offsets=self.offsets()).to_dense()

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[slices, length, ...]: slices are padded, or cut, to one length (default: the longest one's)."""
        lengths = self.lengths()
        if desired_length is None:
            desired_length = int(lengths.max()) if len(lengths) else 0
        columns = torch.arange(desired_length, device=lengths.device)
        is_there = columns < lengths.unsqueeze(1)
        padded = self._values.new_full((*is_there.shape, *self._values.shape[1:]), padding_value)
        places = (self.offsets()[:-1].unsqueeze(1) + columns)[is_there]
        return padded.index_put((is_there,), self._values[places])

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """The weights, padded as values are, or None without weights."""
        weights = None if self._weights is None else JaggedTensor(self._weights, offsets=self.offsets())
        return None if weights is None else weights.to_padded_dense(desired_length, padding_value)

    def _to_lists(self) -> Any:
        values = [value.tolist() for value in self.to_dense()]
        weights = self.to_dense_weights()
        return values if weights is None else {"values": values, "weights": [weight.tolist() for weight in weights]}

    def __str__(self) -> str:
        lists = self._to_lists()
        shown = _as_json(lists) if isinstance(lists, dict) else f"{{\n    {lists}\n}}"
        return f"JaggedTensor({shown})\n"


class KeyedJaggedTensor(_Jagged):
    """Bags of several features' ids for a batch, feature after feature, and in a feature sample after sample.

    keys: names of the features, each once. values: [total]. weights: [total], a factor for each. lengths:
    [keys x batch], or offsets: [keys x batch + 1]. stride: the batch (default: what lengths and keys say).
    length_per_key, or offset_per_key: the number of values of each feature, or where they begin, if that is known.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        length_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
    ) -> None:
        if stride_per_key_per_rank is not None:
            raise ValueError(_VARIABLE)
        super().__init__(values, weights, lengths, offsets)
        if length_per_key is not None:
            offset_per_key = [*accumulate(length_per_key, initial=0)]
        self._keys, self._offset_per_key = list(keys), None if offset_per_key is None else list(offset_per_key)
        if len(set(self._keys)) < len(self._keys):
            raise ValueError(f"keys are {self._keys}, but each feature has one key, once")
        slices = lengths.numel() if lengths is not None else max(len(self.offsets()) - 1, 0)
        self._stride = slices // max(len(self._keys), 1) if stride is None else stride
        if self._offset_per_key and (len(self._offset_per_key), self._offset_per_key[-1]) != (
            len(keys) + 1,
            len(values),
        ):
            raise ValueError(
                f"offset_per_key is {self._offset_per_key}, but has where each of {len(keys)} keys begins, and "
                f"{len(values)}, the number of values"
            )
        if self._stride * len(self._keys) != slices:
            raise ValueError(
                f"{len(self._keys)} keys of {self._stride} samples have {self._stride * len(self._keys)} bags, but "
                f"lengths or offsets describe {slices}"
            )

    _offset_per_key: list[int] | None

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> "KeyedJaggedTensor":
        """Make it of lengths, and wait for the device to know where each feature begins."""
        return KeyedJaggedTensor(keys, values, weights, lengths, None, stride, stride_per_key_per_rank).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> "KeyedJaggedTensor":
        """Make it of offsets, and wait for the device to know where each feature begins."""
        return KeyedJaggedTensor(keys, values, weights, None, offsets, stride, stride_per_key_per_rank).sync()

    @staticmethod
    def from_jt_dict(features: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Make it of a JaggedTensor for each feature, of one batch."""
        parts = [KeyedJaggedTensor([key], x.values(), x.weights_or_none(), x.lengths()) for key, x in features.items()]
        return KeyedJaggedTensor.concat(parts)

    @staticmethod
    def concat(parts: "Sequence[KeyedJaggedTensor]") -> "KeyedJaggedTensor":
        """Join the features of one batch."""
        strides = {part.stride() for part in parts if part.keys()}
        if len(strides) > 1:
            raise ValueError(f"the parts have batches of {', '.join(map(str, sorted(strides)))}: {_VARIABLE}")
        weights = [part.weights() for part in parts if part.weights_or_none() is not None]
        if len(weights) not in (0, len(parts)):
            raise ValueError("some of the parts have weights and others do not: give all of them weights, or none")
        if not parts:
            return KeyedJaggedTensor.empty()
        return KeyedJaggedTensor(
            [key for part in parts for key in part._keys],
            torch.cat([part.values() for part in parts]),
            torch.cat(weights) if weights else None,
            torch.cat([part.lengths() for part in parts]),
            stride=max(strides, default=0),
        )

    @staticmethod
    def empty(is_weighted: bool = False, device: torch.device | None = None) -> "KeyedJaggedTensor":
        """Without features."""
        none, lengths = torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device)
        return KeyedJaggedTensor([], none, none if is_weighted else None, lengths)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor") -> "KeyedJaggedTensor":
        """Without features, with the batch, the device, and weights if there are any, of another one."""
        return kjt.permute([])

    def sync(self) -> Self:
        """Read where each feature begins, which waits for the device."""
        self.offset_per_key()
        return self

    def keys(self) -> list[str]:
        """The features' names."""
        return self._keys

    def stride(self) -> int:
        """The batch: the number of bags of each feature."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """The batch, for each feature."""
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """False: all features are of one batch."""
        return False

    def offset_per_key(self) -> list[int]:
        """The offsets at which each feature's values begin, and the one at which the last one's end."""
        if self._offset_per_key is None:
            ends = self.offsets()[:: self._stride].tolist() if self._stride else [0] * (len(self._keys) + 1)
            self._offset_per_key = ends
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """The offsets at which each feature's values begin, or None if that has not been read."""
        return self._offset_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """The number of values of each feature, or None if that has not been read."""
        return None if self._offset_per_key is None else self.length_per_key()

    def length_per_key(self) -> list[int]:
        """The number of values of each feature."""
        return [stop - start for start, stop in pairwise(self.offset_per_key())]

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(key)
        place = self._keys.index(key)
        start, stop = self.offset_per_key()[place : place + 2]
        lengths = self.lengths()[place * self._stride : (place + 1) * self._stride]
        return JaggedTensor(
            self._values[start:stop], None if self._weights is None else self._weights[start:stop], lengths
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        """A JaggedTensor for each feature."""
        return {key: self[key] for key in self._keys}

    def split(self, segments: Sequence[int]) -> "list[KeyedJaggedTensor]":
        """Successive parts of so many features each."""
        return [self.permute([*range(start, stop)]) for start, stop in pairwise(accumulate(segments, initial=0))]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        """The features of these numbers, in this order. indices_tensor is not read: torchrec takes them there again."""
        keys = [self._keys[index] for index in indices]
        parts = [self[key] for key in keys]
        values = torch.cat([self._values[:0], *(part.values() for part in parts)])
        weights = None if self._weights is None else torch.cat([self._weights[:0], *(part.weights() for part in parts)])
        lengths = torch.cat([self.lengths()[:0], *(part.lengths() for part in parts)])
        return KeyedJaggedTensor(keys, values, weights, lengths, stride=self._stride)

    def __str__(self) -> str:
        return f"KeyedJaggedTensor({_as_json({key: one._to_lists() for key, one in self.to_dict().items()})})\n"


class KeyedTensor(_Tensors):
    """Vectors of several features side by side, by name.

    keys: the features. length_per_key: how wide each one's vectors are. values: [batch, sum of widths]. key_dim: the
    dim along which they stand.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1) -> None:
        self._keys, self._lengths, self._values, self._key_dim = list(keys), list(length_per_key), values, key_dim
        if len(self._keys) != len(self._lengths) or (self._keys and sum(self._lengths) != values.shape[key_dim]):
            raise ValueError(
                f"{len(self._keys)} keys of widths {self._lengths} do not fit values of shape {list(values.shape)}: "
                f"dim {key_dim} is as long as the widths together, {sum(self._lengths)}"
            )

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Make it of a tensor for each feature."""
        return KeyedTensor(keys, [tensor.shape[key_dim] for tensor in tensors], torch.cat([*tensors], cat_dim), key_dim)

    def keys(self) -> list[str]:
        """The features' names."""
        return self._keys

    def values(self) -> Tensor:
        """All vectors, side by side."""
        return self._values

    def key_dim(self) -> int:
        """The dim along which features stand."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """The width of each feature's vectors."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """The columns at which each feature's vectors begin, and the one at which the last one's end."""
        return [*accumulate(self._lengths, initial=0)]

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Tensor]:
        """A view of each feature's vectors."""
        return dict(zip(self._keys, self._values.split(self._lengths, self._key_dim), strict=True))

    @staticmethod
    def regroup(keyed_tensors: "Sequence[KeyedTensor]", groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return for each group of features their vectors side by side."""
        found = {key: value for each in keyed_tensors for key, value in each.to_dict().items()}
        return [torch.cat([found[key] for key in group], keyed_tensors[0].key_dim()) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: "Sequence[KeyedTensor]", groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return what `regroup` does, by the groups' names."""
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def __str__(self) -> str:
        return f"KeyedTensor({_as_json({key: value.tolist() for key, value in self.to_dict().items()})})\n"


_VARIABLE = (
    "a batch size of each feature's own (stride_per_key_per_rank) is not supported: all features have one batch size, "
    "and a sample without ids has an empty bag"
)


class FeatureBags(NamedTuple):
    """Bags of chosen features, one after another, of `batch` samples each; offsets [features x batch + 1].

    exchange: the `IndexExchange` that has begun to send them, if one has.
    """

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch: int
    exchange: Any = None


def select_features(features: Any, names: Sequence[str], *, is_weighted: bool) -> FeatureBags:
    """The bags of these features of a KeyedJaggedTensor, ours or torchrec's, in this order; a name may come twice.

    ValueError for what is none, for a missing feature, for missing weights, for ids that are no integers, and for a
    variable batch size. Copies nothing where the features are those of the KeyedJaggedTensor, in its order.
    """
    if not all(
        hasattr(features, name) for name in ("keys", "values", "lengths", "offsets", "stride", "weights_or_none")
    ):
        raise ValueError(f"an embedding collection takes a KeyedJaggedTensor, not {type(features).__name__}")
    inverse: Callable[[], object] = getattr(features, "inverse_indices_or_none", lambda: None)
    if features.variable_stride_per_key() or inverse() is not None:
        raise ValueError(f"this KeyedJaggedTensor cannot be looked up: {_VARIABLE}")
    keys, indices, batch = list(features.keys()), features.values(), features.stride()
    for name in names:
        if name not in keys:
            near = did_you_mean(name, keys) or f": it has {', '.join(keys) or 'none'}"
            raise ValueError(f"the KeyedJaggedTensor has no feature {name!r}{near}")
    weights = features.weights_or_none() if is_weighted else None
    if is_weighted and weights is None:
        raise ValueError("the collection has is_weighted=True, so its KeyedJaggedTensor has a weight for each id")
    if weights is not None and weights.shape != indices.shape:
        raise ValueError(f"weights are {list(weights.shape)}, but there is one number for each of {len(indices)} ids")
    if indices.dim() != 1 or (indices.numel() and indices.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"ids are {indices.dtype} {list(indices.shape)}, but must be int32 or int64, [total]")
    if indices.dtype not in (torch.int32, torch.int64):  # none, which torch makes as floats
        indices = indices.long()
    if keys == [*names] and batch:
        return FeatureBags(indices, features.offsets(), weights, batch)
    ends = features.offset_per_key() if batch else [0] * (len(keys) + 1)
    if ends[-1] != len(indices):
        raise ValueError(f"the KeyedJaggedTensor's bags have {ends[-1]} ids, but it has {len(indices)} values")
    places = [keys.index(name) for name in names]
    spans = [slice(ends[place], ends[place + 1]) for place in places]
    lengths = features.lengths().to(indices.dtype)
    lengths = torch.cat([lengths[:0], *(lengths[place * batch : (place + 1) * batch] for place in places)])
    chosen = torch.cat([indices[:0], *(indices[span] for span in spans)])
    if weights is not None:
        weights = torch.cat([weights[:0], *(weights[span] for span in spans)])
    return FeatureBags(chosen, _to_offsets(lengths), weights, batch)


def result_type(features: Any, name: str) -> Any:
    """The class `name` (KeyedTensor, JaggedTensor) of the library that the KeyedJaggedTensor is of."""
    for base in type(features).__mro__:
        found = getattr(sys.modules.get(base.__module__), name, None)
        if found is not None:
            return found
    return {"KeyedTensor": KeyedTensor, "JaggedTensor": JaggedTensor}[name]


def _register(kind: type, tensors: Sequence[str], rest: Sequence[str]) -> None:
    """Have torch's pytree look into objects of this kind; leaves may then be anything."""

    def flatten(one: Any) -> tuple[list[Any], Any]:
        return [getattr(one, name) for name in tensors], tuple(getattr(one, name) for name in rest)

    def unflatten(leaves: Any, context: Any) -> Any:
        made: Any = object.__new__(kind)
        vars(made).update(zip((*tensors, *rest), (*leaves, *context), strict=True))
        return made

    register_pytree_node(kind, flatten, unflatten)


_TENSORS = ("_values", "_weights", "_lengths", "_offsets")
_register(JaggedTensor, _TENSORS, ())
_register(KeyedJaggedTensor, _TENSORS, ("_keys", "_stride", "_offset_per_key"))
_register(KeyedTensor, ("_values",), ("_keys", "_lengths", "_key_dim"))
