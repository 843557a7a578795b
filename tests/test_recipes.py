"""The recipes of scripts/recipes: settings of the papers as arguments of timm's train.py."""
import argparse
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import PIL
import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.layers import DropPath
from timm.optim import list_optimizers

from tests.helpers import SCRIPTS, run

RECIPES = SCRIPTS / 'recipes'

# RePaFormer, table 7; LV-ViT-S has the drop path of the published version (RePaViT)
TABLE_7 = {  # batch size, base learning rate, min learning rate, weight decay, drop path rate
    'repa_deit_tiny': (4096, 2.5e-3, 1e-6, .02, .02),
    'repa_deit_small': (4096, 3e-3, 4e-5, .05, .04),
    'repa_deit_base': (4096, 4e-3, 4e-5, .07, .10),
    'repa_swin_tiny': (4096, 5e-3, 5e-5, .20, .10),
    'repa_swin_small': (4096, 6e-3, 5e-5, .15, .09),
    'repa_swin_base': (4096, 4e-3, 2e-5, .10, .08),
    'repa_poolformer_s12': (4096, 2.5e-3, 6e-6, .16, .02),
    'repa_poolformer_s24': (4096, 3.5e-3, 1.5e-6, .08, .01),
    'repa_poolformer_s36': (4096, 5.5e-3, 3e-6, .01, .03),
    'repa_mixer_b16': (4096, 5e-3, 5e-6, .13, .04),
    'repa_mixer_l16': (4096, 4e-3, 1e-5, .16, .05),
    'repa_lvvit_s': (1024, 1e-3, 1e-5, .05, .10),
    'repa_lvvit_m': (1024, 1e-3, 1e-5, .05, .10),
}
# RepOptimizers, section 4.1 and appendix D; of RepOpt-GhostNet the released command and code
REPOPT = {  # batch size, learning rate of 256 images, weight decay, epochs
    **{f'repopt_vgg_{name}': (256, .1, 4e-5, 120) for name in ('b1', 'b2', 'l1', 'l2')},
    'repopt_ghostnet_050': (1024, .6, 1e-5, 300),
}
MODELS = [*TABLE_7, *REPOPT]


# models that share a recipe, by the beginning of their names
SHARED = ('repa_lvvit', 'repopt_vgg')


def recipe_file(model):
    name = next((shared for shared in SHARED if model.startswith(shared)), model)
    return RECIPES / f'{name}.yaml'


def read(model):
    return {**yaml.safe_load(recipe_file(model).read_text()), 'model': model}


def test_one_for_each_model():
    assert sorted(RECIPES.glob('*.yaml')) == sorted({recipe_file(model) for model in MODELS})
    for path in RECIPES.glob('*.yaml'):  # the others are chosen by --model
        assert recipe_file(yaml.safe_load(path.read_text())['model']) == path
    table = re.findall(r'^\| (`.*?) \| (\d+) \|', (RECIPES / 'README.md').read_text(), re.MULTILINE)
    batches = {model: int(batch) for models, batch in table for model in re.findall(r'`(\w+)`', models)}
    assert batches == {model: row[0] for model, row in {**TABLE_7, **REPOPT}.items()}


@pytest.mark.parametrize('model', [
    model if re.search('tiny|s12|050|b1$', model) else pytest.param(model, marks=pytest.mark.slow) for model in MODELS])
def test_model_and_optimizer(model):
    """Both are registered, and the model has the drop path of the recipe."""
    recipe = read(model)
    assert recipe['device_modules'] == ['timm_rep']
    assert recipe['opt'] in list_optimizers()
    created = timm.create_model(model, drop_path_rate=recipe.get('drop_path'), device='meta')
    rate = max((m.drop_prob for m in created.modules() if isinstance(m, DropPath)), default=None)
    assert rate == (recipe.get('drop_path') and pytest.approx(recipe['drop_path']))


@pytest.mark.parametrize('model', MODELS)
def test_batch(model):
    """Processes of the command at the top times the batch size are the images a step of the paper."""
    processes, name = re.search(
        r'torchrun --nproc-per-node (\d+) train\.py --config (\S+) --data-dir IMAGES',
        recipe_file(model).read_text()).groups()
    assert name == recipe_file(model).name
    assert int(processes) * read(model)['batch_size'] == {**TABLE_7, **REPOPT}[model][0]


@pytest.mark.parametrize('model', TABLE_7)
def test_repa(model):
    recipe = read(model)
    _, lr, min_lr, weight_decay, drop_path = TABLE_7[model]
    table = dict(
        epochs=300, opt='lamb', lr=lr, min_lr=min_lr, warmup_lr=1e-6, sched='cosine', weight_decay=weight_decay,
        drop_path=drop_path)
    section_5_1 = dict(warmup_epochs=20)
    deit = dict(
        aa='rand-m9-mstd0.5-inc1', color_jitter=.3, reprob=.25, mixup=.8, cutmix=1., smoothing=.1, aug_repeats=3.,
        train_interpolation='bicubic')
    released = dict(sched_on_updates=True, opt_eps=1e-8, amp=True, crop_pct=.875, interpolation='bicubic')
    if 'lvvit' in model:
        del released['crop_pct']  # LV-ViT is not in that code
    expected = {**table, **section_5_1, **deit, **released}
    assert recipe == {**expected, **{key: recipe[key] for key in ('model', 'device_modules', 'batch_size')}}


@pytest.mark.parametrize('model', REPOPT)
def test_repopt(model):
    recipe = read(model)
    _, lr, weight_decay, epochs = REPOPT[model]
    paper = dict(
        epochs=epochs, opt='repsgd', momentum=.9, lr_base=lr, lr_base_size=256, lr_base_scale='linear', sched='cosine',
        warmup_epochs=5, weight_decay=weight_decay, smoothing=.1)
    if model == 'repopt_ghostnet_050':
        released = dict(
            warmup_lr=4e-4, drop=.2, color_jitter=.4, reprob=.2, train_interpolation='random', crop_pct=.875,
            interpolation='bicubic')
    else:
        released = dict(
            warmup_lr=0., aa=recipe['aa'], train_interpolation='bilinear', crop_pct=1., interpolation='bilinear')
        augment = rand_augment_transform(recipe['aa'], {})
        assert augment.num_layers == 2
        assert all((op.prob, op.magnitude, op.magnitude_max) == (1., 14, 14) for op in augment.ops)
        assert all(op.magnitude_std == float('inf') for op in augment.ops)  # drawn uniformly
    expected = {**paper, **released, 'min_lr': 0., 'sched_on_updates': True}
    assert recipe == {**expected, **{key: recipe[key] for key in ('model', 'device_modules', 'batch_size')}}


@pytest.mark.parametrize('model,level', [('repa_deit_tiny', 10), ('repopt_vgg_b1', 0)])
def test_pillow(model, level):
    """At a level that is drawn, Posterize keeps no bit; Pillow 13 refuses that with the documented error."""
    posterize, = (
        op for op in rand_augment_transform(read(model)['aa'], {}).ops if op.name.startswith('Posterize'))
    assert level <= (posterize.magnitude_max or 10)
    assert posterize.magnitude_std == float('inf') or posterize.magnitude + 3 * posterize.magnitude_std > level
    if posterize.level_fn(level, posterize.hparams) != (0,):
        pytest.skip(f'timm {timm.__version__} keeps at least one bit: README.md can say so')
    posterize = partial(posterize.aug_fn, Image.new('RGB', (2, 2), 'white'), 0)
    text = ' '.join((RECIPES / 'README.md').read_text().split())
    if int(PIL.__version__.split('.')[0]) < 13:
        assert posterize().getextrema() == ((0, 0),) * 3
    else:
        with pytest.raises(ValueError, match='bits') as error:
            posterize()
        assert f'ValueError: {error.value}' in text
    assert "pip install 'pillow<13'" in text
    assert all('pillow<13' in line for line in recipe_file(model).open() if line.startswith('aa:'))


_CHECKOUT = os.environ.get('TIMM_CHECKOUT')

# parses every recipe as a command line with the parser of train.py
_PARSE = '''
import json, sys
import train
commands = json.load(sys.stdin)
print(json.dumps({model: vars(train.parser.parse_args(command)) for model, command in commands.items()}))
'''


def command_line(recipe):
    command = []
    for key, value in recipe.items():
        command.append('--' + key.replace('_', '-'))
        command += [] if value is True else [str(v) for v in (value if isinstance(value, list) else [value])]
    return command


@pytest.mark.skipif(not _CHECKOUT, reason='TIMM_CHECKOUT is not set to a checkout of timm')
@pytest.mark.timeout(1800)
class TestTrainScript:

    def test_every_key_is_an_argument(self):
        """Keys and types of a recipe are as on its command line: from a file, train.py checks neither."""
        commands = {model: command_line(read(model)) for model in MODELS}
        out = run([sys.executable, '-c', _PARSE], input=json.dumps(commands), cwd=_CHECKOUT)
        parsed = json.loads(out.splitlines()[-1])
        for model in MODELS:
            for key, value in read(model).items():
                assert (parsed[model][key], type(parsed[model][key])) == (value, type(value)), f'{model}: {key}'

    @pytest.mark.parametrize('model,more', [
        # train.py runs in several processes, which repeated augmentations require, on GPUs only
        ('repa_deit_tiny', ['--amp-dtype', 'bfloat16', '--aug-repeats', '0', '--model-kwargs', 'img_size=32']),
        ('repopt_ghostnet_050', []),
    ])
    def test_trains(self, images, tmp_path, model, more):
        """One step on tiny images, with all other settings of the recipe."""
        command = [
            sys.executable, Path(_CHECKOUT) / 'train.py', '--config', recipe_file(model), '--model', model,
            '--data-dir', images, '--output', tmp_path, '--experiment', model, '--device', 'cpu',
            '--num-classes', '4', '--img-size', '32', '--batch-size', '16', '--epochs', '1', '--warmup-epochs', '0',
            '-j', '1', *more]
        run(command, cwd=_CHECKOUT)
        recipe = read(model)
        args = yaml.safe_load((tmp_path / model / 'args.yaml').read_text())
        assert {k: args[k] for k in recipe if args[k] != recipe[k]}.keys() <= {
            'batch_size', 'epochs', 'warmup_epochs', 'amp_dtype', 'aug_repeats'}
        with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments of train.py
            last = torch.load(tmp_path / model / 'last.pth.tar', weights_only=True)
        rate = recipe.get('lr') or recipe['lr_base'] * 16 / recipe['lr_base_size']
        assert all(group['initial_lr'] == rate for group in last['optimizer']['param_groups'])
        assert all(v.isfinite().all() for v in last['state_dict'].values())
