"""In place of torch, for guidellm only: the part of torch.utils.data that reads its prompts, in one process."""

import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Tensor:
    """Other packages ask whether an object is one."""


class Module:
    """The same."""


class Generator:
    def manual_seed(self, seed: int) -> "Generator":
        return self


class IterableDataset(Generic[Item]):
    pass


class DataLoader(Generic[Item]):
    """Batches of one item, in order."""

    def __init__(self, dataset: Iterable[Any], collate_fn: Callable[[list], Any], shuffle: bool, **unused: Any) -> None:
        assert not shuffle
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __iter__(self) -> Iterator[Any]:
        return (self.collate_fn([item]) for item in self.dataset)


def _module(name: str, **members: object) -> ModuleType:
    made = sys.modules[f"torch.{name}"] = ModuleType(f"torch.{name}")
    made.__dict__.update(members)
    return made


_dataset = _module("utils.data.dataset", IterableDataset=IterableDataset)
_loader = _module("utils.data.dataloader", DataLoader=DataLoader)
_data = _module("utils.data", dataset=_dataset, dataloader=_loader, get_worker_info=lambda: None)
utils = _module("utils", data=_data)
nn = _module("nn", Module=Module)
