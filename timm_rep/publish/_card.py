"""Model cards, rendered from the files of a folder: config.json, metrics.json, train.yaml, report.json."""
from pathlib import Path
from typing import Any, List, Mapping, Optional, Tuple

from huggingface_hub import EvalResult, ModelCardData

from timm_rep.deploy import BACKENDS, quantized_files, read_report
from timm_rep.deploy import REPORT_NAME as QUANTIZATION_NAME
from timm_rep.hub import (
    CARD_NAME,
    CONFIG_NAME,
    ORGANIZATION,
    SCALES_NAME,
    WEIGHTS_NAME,
    read_folder,
    split_name,
)
from timm_rep.utils.files import StrPath, parse, read_text

from ._metrics import (
    METRICS_NAME,
    PICTURE_NAME,
    PREDICTIONS_NAME,
    REPORT_NAME,
    AccelerationReport,
    Metrics,
    read_metrics,
)

RECIPE_NAME = 'train.yaml'

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
        'A RePaFormer: most hidden channels of each FFN skip the activation, so that after training the FFN folds into '
        'a smaller one with the same output.', _REPA),
    'repa_any': (
        'A timm model with RePaFormer FFNs: some hidden channels skip the activation or are dropped, so that each FFN '
        'folds into at most three small matrices.', _REPA),
    'repopt': (
        'A plain convolutional network that trains like a multi-branch one: the optimizer (RepOptimizer) multiplies '
        'the gradients of its kernels by constants.', _REPOPT),
    'repopt_any': (
        'A multi-branch timm network, trained as a plain one: each sum of linear branches is one convolution, whose '
        'gradients the optimizer (RepOptimizer) multiplies by constants.', _REPOPT),
}
_FILES = {
    WEIGHTS_NAME: 'weights',
    SCALES_NAME: 'scales of the GradMults, the argument `scales` of `timm.create_model`',
    RECIPE_NAME: "recipe for `--config` of timm's `train.py`",
    'base.yaml': 'recipe of the original model, before its conversion',
    METRICS_NAME: 'figures of this card, with machine, versions and dates',
    PREDICTIONS_NAME: 'predictions for a sample of the validation images',
    REPORT_NAME: 'figures and report of the conversion',
    PICTURE_NAME: 'accuracy by speed of the conversions',
    QUANTIZATION_NAME: 'how the int8 form was quantized, and the layers that run in int8',
    **dict.fromkeys((name for backend in BACKENDS.values() for name in backend.files), 'the int8 form, folded'),
    CONFIG_NAME: "configuration in timm's format, with the sha256 of the other files",
}


def write_card(folder: Path, org: str) -> None:
    """Write :func:`card_text` into README.md."""
    (folder / CARD_NAME).write_text(card_text(folder, org), encoding='utf-8')


def card_text(folder: StrPath, org: str) -> str:
    """Model card for the Hub, with the measured and cited figures of metrics.json and report.json.

    Args:
        folder: Folder of the model.
        org: User or organization on the Hub that will publish it.

    Raises:
        FileNotFoundError, RuntimeError: config.json is missing, or a file cannot be read or lacks a field.
        ValueError: The folder is not named after a model.
    """
    folder = Path(folder)
    name, variant = '.'.join(split_name(folder)), split_name(folder)[0]
    config, metrics = read_folder(folder).config, read_metrics(folder)
    for field in 'num_classes', 'pretrained_cfg':
        if field not in config:
            raise RuntimeError(
                f'{str(folder / CONFIG_NAME)!r} must have {field!r}: write the folder with '
                'timm_rep.export(model, folder).')
    files = '\n'.join(f'- `{file}`: {what}' for file, what in _FILES.items() if (folder / file).is_file())
    recipe = read_text(folder / RECIPE_NAME).strip() if (folder / RECIPE_NAME).is_file() else ''
    license_ = config['pretrained_cfg'].get('license')
    _, bibtex = _family(variant)
    return _card(name, license_, metrics, [
        _description(variant, config, metrics),
        _accuracy(metrics),
        _conversion(folder),
        _cost(metrics, variant, folder),
        _int8(folder, f'{org}/{name}'),
        _cited(metrics),
        _usage(name, variant, config, org),
        f'## Files\n\n{files}',
        f'## Recipe\n\n```yaml\n{recipe}\n```' if recipe else '',
        f'## Licence\n\n{license_ or "unknown"}',
        f'## Citation\n\n```bibtex\n{bibtex}\n```' if bibtex else '',
    ])


def accelerated_card(name: str, config: Mapping[str, Any], report: AccelerationReport, conversion: str) -> str:
    """Card of a folder ``name`` of ``timm-rep accelerate``; ``conversion`` is the report of the conversion as text."""
    return _card(name, config['pretrained_cfg'].get('license') or 'other', Metrics(), [
        f'`{config["model_args"]["base"]}` with its FFNs converted from data by '
        '[timm-rep](https://github.com/timm-rep/timm-rep): some of the hidden channels of each FFN are linear, fitted '
        'to unlabelled images.',
        "```python\nimport timm, timm_rep\n\n"
        f"model = timm.create_model('local-dir:{name}', pretrained=True).eval()\n```",
        figures_table(report.figures),
        _setting(report),
        f'```text\n{conversion}\n```',
    ])


def figures_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of :func:`timm_rep.accelerate.measure` as a Markdown table."""
    original = next(iter(figures.values()))
    sizes = list(original['images_per_second'])
    header = ['', 'top-1', 'same class as original', 'params', 'MACs', *(f'images/s, batch {size}' for size in sizes)]
    rows = [header, ['---', *['---:'] * (len(header) - 1)]]
    for name, row in figures.items():
        rates = [
            f'{rate:g} ({rate / original["images_per_second"][size]:.2f}x)'
            for size, rate in row['images_per_second'].items()]
        rows.append([
            name, f'{row["top1"]:.2f}%', f'{row["agreement"]:.1f}%', f'{row["params"] / 1e6:.2f} M',
            f'{row["gmacs"] * 1e3:.1f} M', *rates])
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def _card(name: str, license_: Optional[str], metrics: Metrics, sections: List[str]) -> str:
    accuracy, dataset = metrics.accuracy, metrics.dataset
    results = [EvalResult(
        task_type='image-classification',
        dataset_type=dataset.lower(),
        dataset_name=dataset,
        dataset_split=accuracy.split,
        metric_type='accuracy',
        metric_name='top-1',
        metric_value=accuracy.top1,
    )] if accuracy and dataset else None
    data = ModelCardData(
        library_name='timm',
        license=license_,
        pipeline_tag='image-classification',
        tags=['image-classification', 'timm', 'timm-rep'],
        datasets=[dataset.lower()] if dataset else None,
        model_name=name if results else None,
        eval_results=results,
    )
    front = f'---\n{data.to_yaml()}\n---'
    return '\n\n'.join(section for section in (front, f'# {name}', *sections) if section) + '\n'


def _family(variant: str) -> Tuple[str, str]:
    return _FAMILIES.get(variant) or _FAMILIES.get(variant.split('_')[0], ('', ''))


def _is_ours(variant: str) -> bool:
    """Whether a model is one of this package, with a folded form and published weights, and not timm's own."""
    return bool(_family(variant)[0])


def _description(variant: str, config: Mapping[str, Any], metrics: Metrics) -> str:
    family, _ = _family(variant)
    args = config.get('model_args', {})
    size = ' x '.join(map(str, parse(Tuple[int, int, int], config['pretrained_cfg'].get('input_size'), 'input_size')))
    sentences = [
        family,
        'This is the folded form.' if args.get('reparameterized') else '',
        f'Trained on {metrics.dataset}.' if metrics.dataset else '',
        f'Input: images of {size} (channels, height, width). Output: logits of {config["num_classes"]} classes.',
    ]
    shown = {**{name: value for name, value in args.items() if name != 'scales'}, 'num_classes': config['num_classes']}
    architecture = ', '.join([repr(variant), *(f'{name}={value!r}' for name, value in shown.items())])
    return (
        f'{" ".join(sentence for sentence in sentences if sentence)}\n\n'
        f'Architecture: `timm.create_model({architecture})`.')


def _accuracy(metrics: Metrics) -> str:
    accuracy = metrics.accuracy
    if not accuracy:
        return ''
    dataset = f' of {metrics.dataset}' if metrics.dataset else ''
    return (
        f'## Accuracy\n\nMeasured with the weights of {accuracy.of or "this folder"}, on the {accuracy.images} '
        f'images in {accuracy.split!r}{dataset} ({accuracy.date}).\n\n'
        f'| top-1 | top-5 |\n|---|---|\n| {accuracy.top1:.2f}% | {accuracy.top5:.2f}% |')


def _conversion(folder: Path) -> str:
    if not (folder / REPORT_NAME).is_file():
        return ''
    report = AccelerationReport.from_json(folder / REPORT_NAME)
    return (
        '## Conversion\n\nConverted from unlabelled images by `timm-rep accelerate`, which measured these figures.\n\n'
        f'{figures_table(report.figures)}\n\n{_setting(report)}')


def _setting(report: AccelerationReport) -> str:
    versions = ', '.join(f'{package} {version}' for package, version in report.versions.items())
    command = f'\n\n```sh\n{report.command}\n```' if report.command else ''
    return f'Machine: {report.machine}. {versions}.{command}'


def _cost(metrics: Metrics, variant: str, folder: Path) -> str:
    cost = metrics.cost
    if not cost:
        return ''
    has_int8 = 'int8' in cost.forms and quantized_files(folder)  # on a GPU its speed is not measured
    int8 = f', int8 by {BACKENDS[read_report(folder).backend].runtime}' if has_int8 else ''
    names = {} if _is_ours(variant) else {'folded': 'float32'}
    rows = [
        f'| {names.get(form, form)} | {figures.params / 1e6:.2f} M | {figures.gmacs:.3g} G | '
        f'{figures.images_per_second:g} |'
        for form, figures in cost.forms.items()
    ]
    ratio = ''
    if 'unfolded' in cost.forms:
        speedup = cost.forms['folded'].images_per_second / cost.forms['unfolded'].images_per_second
        ratio = f' Speedup by folding: {speedup:.2f}.'
    return (
        '## Size and speed\n\n'
        f'Measured on {cost.machine}, batch size {cost.batch_size}, {cost.dtype}, torch '
        f'{cost.versions["torch"]}{int8} ({cost.date}).{ratio}\n\n'
        '| form | parameters | multiply-accumulates | images per second |\n|---|---|---|---|\n' + '\n'.join(rows))


def _int8(folder: Path, repository: str) -> str:
    files = quantized_files(folder)
    if not files:
        return ''
    report, megabytes = read_report(folder), sum(path.stat().st_size for path in files) / 1e6
    backend = BACKENDS[report.backend]
    accuracy = (
        f' Top-1 accuracy on {report.accuracy.images} images: {report.accuracy.int8:.2f}%, in float32 '
        f'{report.accuracy.fp32:.2f}%.' if report.accuracy else '')
    return f'''## Int8

The folded model with int8 weights and activations, for {backend.runtime} on a CPU, {megabytes:.1f} MB.{accuracy}

```python
import timm_rep   # pip install 'timm-rep[{backend.extra}]'
from huggingface_hub import snapshot_download

int8 = timm_rep.deploy.load_quantized(snapshot_download('{repository}'))     # or a folder like this one
```'''


def _cited(metrics: Metrics) -> str:
    if not metrics.cited:
        return ''
    return '## Cited\n\nThese figures are cited from the sources named, not measured here.\n\n' + '\n'.join(
        f'- {figure.what}: {figure.value} ({figure.source})' for figure in metrics.cited)


def _usage(name: str, variant: str, config: Mapping[str, Any], org: str) -> str:
    # create_model() looks for models of other organizations only by their full name
    source = name if org == ORGANIZATION else f'hf-hub:{org}/{name}'
    fold = "\nmodel.reparameterize()   # fold: the same outputs up to rounding, less computation"
    if not _is_ours(variant):
        source, fold = f'local-dir:{name}', ''
    elif config.get('model_args', {}).get('reparameterized'):
        fold = ''
    return f'''## Usage

```python
import timm
import timm_rep   # pip install timm-rep

model = timm.create_model('{source}', pretrained=True).eval(){fold}

config = timm.data.resolve_data_config(model=model)
transform = timm.data.create_transform(**config)
probabilities = model(transform(image).unsqueeze(0)).softmax(-1)   # image: a PIL image
```

Where the model is published on the Hub, its name there is `hf-hub:{org}/{name}`.'''
