# SPDX-License-Identifier: Apache-2.0
"""`prefetch_embeddings`: the ids of the next batch are exchanged while this one is trained on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn
from torch.utils._pytree import tree_leaves

from stretto.recommendation.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from stretto.recommendation.index_exchange import EndOfBatches, IndexExchange
from stretto.suggestions import did_you_mean, require_type

Batch = TypeVar("Batch")
_Collections = Mapping[str, EmbeddingBagCollection | EmbeddingCollection]


def prefetch_embeddings(
    model: nn.Module,
    batches: Iterable[Batch],
    features: Callable[[Batch], Any] | Mapping[str, Callable[[Batch], Any]] | None = None,
) -> Iterator[Batch]:
    """Yield the batches; each one's ids are on their way to the tables' ranks while the batch before it is trained on.

    model: with collections that `distribute_embeddings` has made, which are called with a batch's features as before,
    and give the same numbers. Collective: all ranks iterate over equally many batches of this rank's samples, on its
    device. features: takes a batch and returns the KeyedJaggedTensor that all collections are given; or a dict of such
    functions by the collections' names in the model, which may leave some out; default: the only one in the batch,
    which is one itself, or a tuple, list, dict or object that has one. A GPU exchanges on a stream of its own.

    Errors come as without this function: what `batches` raises at its batch's turn, where the other ranks raise a
    ValueError, too; of bad ids at the call of the collection. Raises ValueError for a model without such collections,
    where ranks have unequally many batches, where weights of ids need gradients (they depend on the step before), and
    where a collection was called with other features than those that were sent ahead.
    """
    require_type(model, nn.Module, "model")
    collections = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection) and module.is_distributed
    }
    if not collections:
        raise ValueError(
            f"{type(model).__name__} has no distributed EmbeddingBagCollection or EmbeddingCollection, whose ids could "
            "be sent ahead: call distribute_embeddings first"
        )
    if not isinstance(features, Mapping):
        features = dict.fromkeys(collections, features or _find_features)
    for name in features:
        if name not in collections:
            near = did_you_mean(name, collections) or f": they are {', '.join(collections)}"
            raise ValueError(f"features: no collection is named {name!r}{near}")
    return _iterate({name: collections[name] for name in features}, batches, features)


def _iterate(
    collections: _Collections, batches: Iterable[Batch], features: Mapping[str, Callable[[Batch], Any]]
) -> Iterator[Batch]:
    source = iter(batches)
    try:
        step = _start(collections, source, features)
        while step.error is None:
            ahead = _start(collections, source, features)
            yield cast(Batch, step.batch)
            for name, exchange in step.started.items():
                if collections[name].was_left(exchange):
                    exchange.wait()  # which raises what was wrong with them
                    raise ValueError(
                        f"{name or 'the model'} was not called with the features of its batch that were sent ahead: "
                        "have features= return these, or leave it out there"
                    )
            step = ahead
        try:
            for exchange in step.started.values():  # in which the ranks compare which of them have none left
                exchange.wait()
        except EndOfBatches:
            return
        except Exception:
            for module in collections.values():  # ranks that have this batch have begun the exchange of the next one
                module.send_ahead(None, step.error)
            raise
    finally:
        for module in collections.values():
            module.drop_ahead()


class _BatchAhead(NamedTuple):
    """A batch whose exchanges have begun, by collection, or the error that this rank is to raise at its turn."""

    batch: Any
    started: dict[str, IndexExchange]
    error: Exception | None


def _start(
    collections: _Collections, source: Iterator[Batch], features: Mapping[str, Callable[[Batch], Any]]
) -> _BatchAhead:
    batch, given = None, dict[str, Any]()
    error: Exception | None = None
    try:
        batch = next(source)
        given = {name: select(batch) for name, select in features.items()}
    except StopIteration:
        error = EndOfBatches()
    except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must learn of it)
        error = raised
    started = {name: module.send_ahead(given.get(name), error) for name, module in collections.items()}
    return _BatchAhead(batch, started, error)


def _find_features(batch: Any) -> Any:
    """The only KeyedJaggedTensor of a batch. ValueError if there is none, or more."""
    parts = [batch]
    if not _is_keyed(batch):
        is_plain = isinstance(batch, tuple | list | dict)
        parts = tree_leaves(batch if is_plain else dict(getattr(batch, "__dict__", {})), is_leaf=_is_keyed)
    found = [part for part in parts if _is_keyed(part)]
    if len(found) != 1:
        raise ValueError(
            f"a batch ({type(batch).__name__}) has {len(found)} KeyedJaggedTensors: give features=, which returns the "
            "one that the collections are called with"
        )
    return found[0]


def _is_keyed(value: Any) -> bool:
    return hasattr(value, "keys") and hasattr(value, "offset_per_key") and hasattr(value, "weights_or_none")
