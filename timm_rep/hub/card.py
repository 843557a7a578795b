"""Model cards, written from what is in the folder: config.json, metrics.json, train.yaml."""
import inspect
import os
from pathlib import Path
from typing import Any, List, Mapping, Optional, Tuple, Union

import timm
from huggingface_hub import EvalResult, ModelCardData

from timm_rep.utils.atomic import replacing_files

from .files import CONFIG, SCALES, WEIGHTS, Published
from .folder import split_name
from .metrics import METRICS, PREDICTIONS, read_metrics
from .sources import organization

__all__ = ['CARD', 'TRAIN', 'card_text', 'write_card']

CARD = 'README.md'
TRAIN = 'train.yaml'

_REPA = '''@inproceedings{xu2025repavit,
  title = {RePaViT: Scalable Vision Transformer Acceleration via Structural Reparameterization on Feedforward Network
           Layers},
  author = {Xu, Xuwei and Li, Yang and Chen, Yudong and Liu, Jiajun and Wang, Sen},
  booktitle = {The 42nd International Conference on Machine Learning (ICML)},
  year = {2025}
}'''
_REPOPT = '''@article{ding2022re,
  title = {Re-parameterizing Your Optimizers rather than Architectures},
  author = {Ding, Xiaohan and Chen, Honghao and Zhang, Xiangyu and Huang, Kaiqi and Han, Jungong and Ding, Guiguang},
  journal = {arXiv preprint arXiv:2205.15242},
  year = {2022}
}'''
_FAMILIES = {
    'repa': (
        'A RePaFormer: most hidden channels of its FFNs skip the activation, so that after training the FFNs fold into '
        'smaller ones that compute the same.', _REPA),
    'repopt': (
        'A plain network, trained with RepOptimizers: the structural prior of a multi-branch network is in the '
        'optimizer, by multipliers of the gradients.', _REPOPT),
}
_FILES = {
    WEIGHTS: 'the weights',
    SCALES: 'the searched scales that it was trained with, `scales=` of `timm.create_model`',
    TRAIN: 'the recipe, for `train.py --config` of timm',
    METRICS: 'the figures of this card, with the machine, the versions and the dates',
    PREDICTIONS: 'a sample of its predictions on the validation images',
    CONFIG: "timm's, with the sha256 of the other files",
}


def write_card(folder: Union[str, os.PathLike]) -> None:
    """Write the README.md of a published model; see :func:`card_text`."""
    text = card_text(folder)
    with replacing_files(folder) as temporary:
        (temporary / CARD).write_text(text, encoding='utf-8')


def card_text(folder: Union[str, os.PathLike]) -> str:
    """A model card for the Hub. Every figure is from metrics.json, where it was measured or is cited.

    Raises:
        FileNotFoundError, RuntimeError: There is no config.json, or a file cannot be read.
        ValueError: The folder is not named after a model.
    """
    folder = Path(folder)
    variant, tag = split_name(folder)
    config, metrics = Published.in_folder(folder).config, read_metrics(folder)
    sections = [
        _front_matter(f'{variant}.{tag}', config, metrics),
        f'# {variant}.{tag}',
        _description(variant, config, metrics),
        _accuracy(metrics),
        _cost(metrics),
        _cited(metrics),
        _usage(f'{variant}.{tag}', config),
        _files(folder),
        _recipe(folder),
        f'## Licence\n\n{config["pretrained_cfg"].get("license", "unknown")}',
        _citation(variant),
    ]
    return '\n\n'.join(section for section in sections if section) + '\n'


def _family(variant: str) -> Tuple[str, str]:
    return _FAMILIES.get(variant.split('_')[0], ('', ''))


def _front_matter(name: str, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    results: Optional[List[EvalResult]] = None
    accuracy, dataset = metrics.get('accuracy'), metrics.get('dataset')
    if accuracy and dataset:
        results = [EvalResult(
            task_type='image-classification',
            dataset_type=dataset.lower(),
            dataset_name=dataset,
            dataset_split=accuracy['split'],
            metric_type='accuracy',
            metric_name='top-1',
            metric_value=accuracy['top1'],
        )]
    data = ModelCardData(
        library_name='timm',
        license=config['pretrained_cfg'].get('license'),
        pipeline_tag='image-classification',
        tags=['image-classification', 'timm', 'timm-rep'],
        datasets=[dataset.lower()] if dataset else None,
        model_name=name if results else None,
        eval_results=results,
    )
    return f'---\n{data.to_yaml()}\n---'


def _description(variant: str, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    what, _ = _family(variant)
    entry = inspect.getdoc(timm.model_entrypoint(variant)) or ''
    size = ' x '.join(map(str, config['pretrained_cfg']['input_size'][1:]))
    trained = f' Trained on {metrics["dataset"]}.' if metrics.get('dataset') else ''
    folded = ' This is its folded form.' if config.get('model_args', {}).get('reparameterized') else ''
    return (
        f'{what}{folded}{trained} Images of {size}, {config["num_classes"]} classes.\n\n'
        f'The architecture by default, for ImageNet: {entry.splitlines()[0] if entry else variant}').strip()


def _accuracy(metrics: Mapping[str, Any]) -> str:
    accuracy = metrics.get('accuracy')
    if not accuracy:
        return ''
    of = ' of ' + metrics['dataset'] if metrics.get('dataset') else ''
    return (
        f'## Accuracy\n\nMeasured with the weights of {accuracy.get("of", "this folder")}, on the {accuracy["images"]} '
        f'images in {accuracy["split"]!r}{of} ({accuracy["date"]}).\n\n'
        f'| top-1 | top-5 |\n|---|---|\n| {accuracy["top1"]:.2f}% | {accuracy["top5"]:.2f}% |')


def _cost(metrics: Mapping[str, Any]) -> str:
    cost = metrics.get('cost')
    if not cost:
        return ''
    rows = [
        f'| {form} | {of["params"] / 1e6:.2f} M | {of["gmacs"]:.3g} G | {of["images_per_second"]:g} |'
        for form, of in cost['forms'].items()
    ]
    throughput = [of['images_per_second'] for of in cost['forms'].values()]
    ratio = f' Folded it runs at {throughput[-1] / throughput[0]:.2f} times the speed.' if len(throughput) > 1 else ''
    return (
        '## Size and speed\n\n'
        f'Measured on {cost["machine"]}, batch size {cost["batch_size"]}, {cost["dtype"]}, torch '
        f'{cost["versions"]["torch"]} ({cost["date"]}).{ratio}\n\n'
        '| | parameters | multiply-accumulates | images a second |\n|---|---|---|---|\n' + '\n'.join(rows))


def _cited(metrics: Mapping[str, Any]) -> str:
    cited = metrics.get('cited')
    if not cited:
        return ''
    return '## Cited\n\nNot measured by us.\n\n' + '\n'.join(
        f'- {of["what"]}: {of["value"]} ({of["source"]})' for of in cited)


def _usage(name: str, config: Mapping[str, Any]) -> str:
    fold = '' if config.get('model_args', {}).get('reparameterized') else (
        "\nmodel.reparameterize()   # the same function, folded")
    return f'''## Usage

```python
import timm
import timm_rep   # pip install timm-rep

model = timm.create_model('{name}', pretrained=True).eval(){fold}

config = timm.data.resolve_data_config(model=model)
transform = timm.data.create_transform(**config)
probabilities = model(transform(image).unsqueeze(0)).softmax(-1)   # image: of PIL
```

It is also `hf-hub:{organization()}/{name}`, where it is published there.'''


def _files(folder: Path) -> str:
    lines = [f'- `{name}`: {what}' for name, what in _FILES.items() if (folder / name).is_file()]
    return '## Files\n\n' + '\n'.join(lines)


def _recipe(folder: Path) -> str:
    path = folder / TRAIN
    if not path.is_file():
        return ''
    recipe = path.read_text(encoding='utf-8').strip()
    return f'## Recipe\n\n```yaml\n{recipe}\n```'


def _citation(variant: str) -> str:
    _, bibtex = _family(variant)
    return f'## Citation\n\n```bibtex\n{bibtex}\n```' if bibtex else ''
