"""Model cards, written from the files of a folder: config.json, metrics.json, train.yaml."""
import os
from pathlib import Path
from typing import Any, Mapping, Tuple, Union

from huggingface_hub import EvalResult, ModelCardData

from timm_rep.deploy import BACKENDS, REPORT_NAME, quantized_files, read_report
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.files import COUNT, MAPPING, check_fields, read_text

from .folder import split_name
from .load import organization
from .metrics import METRICS, PREDICTIONS, read_metrics
from .repository import CARD, CONFIG, IMAGES, SCALES, WEIGHTS, read_folder

__all__ = ['TRAIN', 'card_text', 'write_card']

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
        'A RePaFormer: most hidden channels of each FFN skip the activation, so that after training the FFN folds into '
        'a smaller one with the same output.', _REPA),
    'repa_any': (
        'A pretrained model of timm whose FFNs became RePa FFNs: a linear path replaces most hidden channels, so that '
        'each FFN has three small matrices.', _REPA),
    'repopt': (
        'A plain convolutional network that trains like a multi-branch one: the optimizer (RepOptimizer) multiplies '
        'the gradients of its kernels by constants.', _REPOPT),
    'repopt_any': (
        'A multi-branch network of timm, trained as a plain one: each sum of linear branches is one convolution, whose '
        'gradients the optimizer (RepOptimizer) multiplies by constants.', _REPOPT),
}
_FILES = {
    WEIGHTS: 'weights',
    SCALES: 'scales of the training, the argument `scales` of `timm.create_model`',
    TRAIN: "recipe for `--config` of timm's `train.py`",
    METRICS: 'figures of this card, with machine, versions and dates',
    PREDICTIONS: 'predictions for a sample of the validation images',
    REPORT_NAME: 'how the int8 form was quantized, and what runs in int8',
    **dict.fromkeys((name for backend in BACKENDS.values() for name in backend.files), 'the int8 form, folded'),
    CONFIG: "configuration in timm's format, with the sha256 of the other files",
}


def write_card(folder: Union[str, os.PathLike]) -> None:
    """Write :func:`card_text` into README.md."""
    text = card_text(folder)
    with replacing_files(folder) as temporary:
        (temporary / CARD).write_text(text, encoding='utf-8')


def card_text(folder: Union[str, os.PathLike]) -> str:
    """Model card for the Hub, with the measured and cited figures of metrics.json.

    Raises:
        FileNotFoundError, RuntimeError: There is no config.json, or a file cannot be read or lacks a field.
        ValueError: The folder is not named after a model.
    """
    folder = Path(folder)
    variant, tag = split_name(folder)
    config, metrics = read_folder(folder).config, read_metrics(folder)
    source = repr(str(folder / CONFIG))
    cfg = check_fields(config, source, {'num_classes': COUNT, 'pretrained_cfg': MAPPING})['pretrained_cfg']
    check_fields(cfg, f'{source}: pretrained_cfg', {'input_size': IMAGES['input_size']})
    files = '\n'.join(f'- `{name}`: {what}' for name, what in _FILES.items() if (folder / name).is_file())
    recipe = read_text(folder / TRAIN).strip() if (folder / TRAIN).is_file() else ''
    _, bibtex = _family(variant)
    sections = [
        _front_matter(f'{variant}.{tag}', config, metrics),
        f'# {variant}.{tag}',
        _description(variant, config, metrics),
        _accuracy(metrics),
        _cost(metrics),
        _int8(folder, f'{variant}.{tag}'),
        _cited(metrics),
        _usage(f'{variant}.{tag}', config),
        f'## Files\n\n{files}',
        f'## Recipe\n\n```yaml\n{recipe}\n```' if recipe else '',
        f'## Licence\n\n{config["pretrained_cfg"].get("license", "unknown")}',
        f'## Citation\n\n```bibtex\n{bibtex}\n```' if bibtex else '',
    ]
    return '\n\n'.join(section for section in sections if section) + '\n'


def _family(variant: str) -> Tuple[str, str]:
    return _FAMILIES.get(variant) or _FAMILIES.get(variant.split('_')[0], ('', ''))


def _front_matter(name: str, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    results = None
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
    family, _ = _family(variant)
    args = config.get('model_args', {})
    size = ' x '.join(map(str, config['pretrained_cfg']['input_size']))
    sentences = [
        family,
        'This is the folded form.' if args.get('reparameterized') else '',
        f'Trained on {metrics["dataset"]}.' if metrics.get('dataset') else '',
        f'Input: images of {size} (channels, height, width). Output: logits of {config["num_classes"]} classes.',
    ]
    architecture = ', '.join([repr(variant), *(f'{name}={value!r}' for name, value in args.items())])
    return (
        f'{" ".join(sentence for sentence in sentences if sentence)}\n\n'
        f'Architecture: `timm.create_model({architecture})`.')


def _accuracy(metrics: Mapping[str, Any]) -> str:
    accuracy = metrics.get('accuracy')
    if not accuracy:
        return ''
    dataset = f' of {metrics["dataset"]}' if metrics.get('dataset') else ''
    return (
        f'## Accuracy\n\nMeasured with the weights of {accuracy.get("of", "this folder")}, on the {accuracy["images"]} '
        f'images in {accuracy["split"]!r}{dataset} ({accuracy["date"]}).\n\n'
        f'| top-1 | top-5 |\n|---|---|\n| {accuracy["top1"]:.2f}% | {accuracy["top5"]:.2f}% |')


def _cost(metrics: Mapping[str, Any]) -> str:
    cost = metrics.get('cost')
    if not cost:
        return ''
    rows = [
        f'| {form} | {figures["params"] / 1e6:.2f} M | {figures["gmacs"]:.3g} G | {figures["images_per_second"]:g} |'
        for form, figures in cost['forms'].items()
    ]
    throughput = {form: figures['images_per_second'] for form, figures in cost['forms'].items()}
    speedup = throughput['folded'] / throughput.get('unfolded', throughput['folded'])
    ratio = f' Speedup by folding: {speedup:.2f}.' if 'unfolded' in throughput else ''
    return (
        '## Size and speed\n\n'
        f'Measured on {cost["machine"]}, batch size {cost["batch_size"]}, {cost["dtype"]}, torch '
        f'{cost["versions"]["torch"]} ({cost["date"]}).{ratio}\n\n'
        '| form | parameters | multiply-accumulates | images per second |\n|---|---|---|---|\n' + '\n'.join(rows))


def _int8(folder: Path, name: str) -> str:
    files = quantized_files(folder)
    if not files:
        return ''
    report, megabytes = read_report(folder), sum(path.stat().st_size for path in files) / 1e6
    runtime = {'inductor': 'torch on x86', 'onnxruntime': 'ONNX Runtime'}[report.backend]
    accuracy = (
        f' Top-1 accuracy on {report.accuracy.images} images: {report.accuracy.int8:.2f}%, in float32 '
        f'{report.accuracy.fp32:.2f}%.' if report.accuracy else '')
    return f'''## Int8

The folded model with int8 weights and activations, for {runtime} on a CPU, {megabytes:.1f} MB.{accuracy}

```python
import timm_rep   # pip install 'timm-rep[deploy]'
from huggingface_hub import snapshot_download

int8 = timm_rep.deploy.load_quantized(snapshot_download('{organization()}/{name}'))     # or a folder like this one
```'''


def _cited(metrics: Mapping[str, Any]) -> str:
    cited = metrics.get('cited')
    if not cited:
        return ''
    return '## Cited\n\nThese figures are from the sources named, not measured by us.\n\n' + '\n'.join(
        f'- {figure["what"]}: {figure["value"]} ({figure["source"]})' for figure in cited)


def _usage(name: str, config: Mapping[str, Any]) -> str:
    fold = '' if config.get('model_args', {}).get('reparameterized') else (
        "\nmodel.reparameterize()   # fold: the same outputs up to rounding, less computation")
    return f'''## Usage

```python
import timm
import timm_rep   # pip install timm-rep

model = timm.create_model('{name}', pretrained=True).eval(){fold}

config = timm.data.resolve_data_config(model=model)
transform = timm.data.create_transform(**config)
probabilities = model(transform(image).unsqueeze(0)).softmax(-1)   # image: a PIL image
```

Where the model is published on the Hub, its name there is `hf-hub:{organization()}/{name}`.'''
