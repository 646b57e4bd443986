"""torch's DataLoader, with a clock where batches are waited for and where they are made; nothing here changes a batch."""

from __future__ import annotations

import functools
import inspect
import time
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perftrain.attach import facts_of

if TYPE_CHECKING:
    from perftrain.attach.session import Session


def open_loaders(session: Session) -> None:
    """Clocks at the DataLoader's iterators and fetchers, and the arguments that are forced on it."""
    from torch.utils.data import _utils, dataloader

    base = dataloader._BaseDataLoaderIter
    following = base.__next__

    def next_batch(self: Any) -> Any:
        clock = session.clock
        if clock.thread != get_ident() or clock.stack[-1] == "data_wait":
            return following(self)
        clock.stack[0] = "rest"
        clock.enter("data_wait")
        began, first = time.perf_counter(), self.__dict__.pop("_perftrain_first", False)
        if (loader := self.__dict__.get("_perftrain_loader")) is not None:
            loader["drawn"] += 1
        try:
            if session.turns is not None and (kept := session.turns.batch(self)) is not None:
                return kept
            batch = following(self)
            if session.turns is not None:
                batch = session.turns.keep(self, batch)
            return batch
        except StopIteration:
            session.sums["last_s"] += time.perf_counter() - began  # workers are stopped here
            raise
        finally:
            clock.leave()
            if first:
                session.sums["first_batch_s"] += time.perf_counter() - began

    base.__next__ = next_batch
    loader_iter = dataloader.DataLoader.__iter__

    def iterate(self: Any) -> Any:
        clock = session.clock
        if clock.thread != get_ident() or clock.stack[-1] == "data_wait":
            return loader_iter(self)
        began = time.perf_counter()
        clock.enter("data_wait")
        try:
            iterator = loader_iter(self)
            iterator.__dict__["_perftrain_first"] = True
            if isinstance(iterator, base):
                iterator.__dict__["_perftrain_loader"] = session.loaders.setdefault(id(self), facts_of.loader(self))
            return iterator
        finally:
            clock.leave()
            new = not self.__dict__.get("_perftrain_known", False)
            self.__dict__["_perftrain_known"] = True
            session.counts["epochs"] += 1
            session.counts["new_loaders"] += new
            session.sums["iter_s"] += time.perf_counter() - began
            session.counts["worker_starts"] += self.num_workers if new or not self.persistent_workers else 0

    dataloader.DataLoader.__iter__ = iterate
    _forced_arguments(session, dataloader.DataLoader)
    _fetchers(session, _utils.fetch)


def _forced_arguments(session: Session, loader: Any) -> None:
    """Arguments of the loaders that train (shuffled, or in batches of several samples), for the whole run."""
    forced = session.orders.loader
    init = loader.__init__
    if not forced:
        return
    signature = inspect.signature(init)

    @functools.wraps(init)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self", None)
        given.update(given.pop("kwargs", {}))
        if given.get("batch_size", 1) != 1 or given.get("shuffle") or given.get("batch_sampler") or given.get("sampler"):
            given.update(forced)
            if not given.get("num_workers"):
                given.update(prefetch_factor=None, persistent_workers=False)
        init(self, **given)

    loader.__init__ = built


def _fetchers(session: Session, fetch: Any) -> None:
    base = fetch._BaseDatasetFetcher
    init = base.__init__

    def made(self: Any, dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool) -> None:
        init(self, dataset, auto_collation, _Collate(session, collate_fn), drop_last)

    base.__init__ = made
    for cls in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        _fetcher(session, cls)


def _fetcher(session: Session, cls: Any) -> None:
    from torch.utils.data._utils import worker

    original = cls.fetch

    def fetched(self: Any, index: Any) -> Any:
        try:
            return session.fetching.fetch(original, self, index)
        finally:
            if worker._worker_info is not None:
                session.fetching.in_worker()

    cls.fetch = fetched


class _Collate:
    """The collate function with a clock. Made where the fetcher is, in the worker itself: it never travels."""

    def __init__(self, session: Session, function: Any) -> None:
        self.session, self.function = session, function

    def __call__(self, samples: Any) -> Any:
        return self.session.fetching.collate(self.function, samples)
