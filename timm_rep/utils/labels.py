"""Names of classes: of datasets, and recorded in models."""
from typing import Any, Mapping, Optional, Sequence, Union

import torch.nn as nn
from torch.utils.data import Dataset


def class_names(dataset: Dataset) -> Optional[Sequence[Any]]:
    """The classes of a dataset, by index; None if unknown."""
    indices = getattr(getattr(dataset, 'reader', None), 'class_to_idx', None)
    return sorted(indices, key=indices.get) if indices else getattr(dataset, 'classes', None)


def check_same_classes(classes: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError unless the splits, by name, have the same classes in the same order."""
    (first, expected), *others = classes.items()
    for split, found in others:
        if list(found) != list(expected):
            differing = sorted({*expected} ^ {*found}, key=str) or expected
            raise ValueError(
                f'Expected the same classes in {first!r} and {split!r}, but they differ in '
                f'{", ".join(str(name) or repr(name) for name in differing[:5])}. The order of the classes defines the '
                'labels.')


def recorded_labels(model: nn.Module) -> Optional[Sequence[str]]:
    """Names of the classes by index that a model was trained with, if its pretrained_cfg lists one for each."""
    names = labels_by_index(model.pretrained_cfg.get('label_names'))
    return names if names is not None and len(names) == model.num_classes else None


def labels_by_index(names: Union[Sequence[str], Mapping[Any, str], None]) -> Optional[Sequence[str]]:
    """timm's label_names as a list; None if they are a mapping from numbers that has gaps."""
    if not isinstance(names, Mapping):
        return names if isinstance(names, (list, tuple)) else None
    by_number, numbers = {str(index): name for index, name in names.items()}, [str(i) for i in range(len(names))]
    return [by_number[i] for i in numbers] if by_number.keys() == {*numbers} else None
