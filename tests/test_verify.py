"""verify(): what folding loses, and the layer at which it loses more than rounding."""
import copy
import json
import subprocess
import sys

import pytest
import timm
import torch
import torch.nn as nn
from PIL import Image
from timm.models.byobnet import MobileOneBlock

import timm_rep
from tests.convert.multi_branch import FAMILIES
from tests.helpers import images, randomize_, same_weights, tiny
from timm_rep._causes import _tf32
from timm_rep._verify import Verification
from timm_rep.cli import main
from timm_rep.layers import RePaMlp

MODELS = [
    ('repa_deit_tiny', {}, 2),
    ('repa_swin_tiny', {}, 4),
    ('repa_mixer_s32', {}, 3),
    ('repa_poolformer_s12', {}, 4),
    ('repa_lvvit_s', {}, 3),
    ('repopt_vgg_l2se', {}, 7),
    ('repopt_vgg_b1', dict(structure='search'), 7),
    ('repopt_ghostnet_050', {}, 8),
]


ARGS = ['--model-kwargs', 'img_size=32', 'patch_size=8', 'embed_dim=24', 'depth=2', 'num_heads=3', 'num_classes=5']


@pytest.mark.parametrize('name,kwargs,layers', MODELS, ids=str)
def test_every_family(name, kwargs, layers):
    """Folding loses no more than rounding does, in the outputs and in each layer."""
    result = timm_rep.verify(randomize_(tiny(name, **kwargs)))
    assert result.passed
    assert result.first_difference is None
    assert result.folded == len(result.layers) == layers
    assert all(0 < folded < 4 * max(unfolded, 2 ** -23) for unfolded, folded in result.layers.values())
    assert str(result).endswith('\npassed')
    assert result.images == 8
    assert result.top1_agreement == 1


@pytest.mark.parametrize('name', [
    'repvgg_a0', *(pytest.param(name, marks=pytest.mark.slow) for name in ('mobileone_s0', 'fastvit_t8'))])
def test_models_of_timm(name):
    torch.manual_seed(0)
    result = timm_rep.verify(randomize_(timm.create_model(name, num_classes=5)), images(1, 32))
    assert result.passed
    assert result.folded > 10
    assert result.folded_error > 0


def test_the_numbers():
    """The differences are of the outputs, with the unfolded model in float64 as reference; the model is unchanged."""
    model = tiny('repa_deit_tiny').train()
    torch.nn.init.normal_(model.blocks[0].mlp.norm1.running_mean)
    before = copy.deepcopy(model)
    x = images(3, 32)
    result = timm_rep.verify(model, x)
    assert same_weights(model, before)
    assert all(module.training for module in model.modules())

    def rms(y):
        return y.double().square().mean().sqrt()

    folded = copy.deepcopy(before.eval()).reparameterize()
    with torch.no_grad():  # one image at a time: a batch may be rounded differently
        unfolded, folded = (torch.cat([net(image) for image in x.split(1)]) for net in (before, folded))
        exact = before.double()(x.double())
    for found, expected in (
            (result.max_difference, (folded - unfolded).abs().max()),
            (result.relative_rms, rms(folded - unfolded) / rms(unfolded)),
            (result.unfolded_error, rms(unfolded - exact) / rms(exact)),
            (result.folded_error, rms(folded - exact) / rms(exact))):
        assert found == pytest.approx(expected.item(), rel=1e-6)
    assert result.images == 3
    assert list(result.layers) == ['blocks.0.mlp', 'blocks.1.mlp']


def test_converted_half_precision_and_nothing_to_fold():
    model = timm.create_model('deit3_small_patch16_224', img_size=32, depth=2, embed_dim=24, num_heads=3)
    assert str(timm_rep.verify(model)) == 'nothing to fold'
    timm_rep.convert_to_repa(model)
    model = randomize_(model).bfloat16()
    result = timm_rep.verify(model, images(2, 32))
    assert (result.passed, result.folded) == (True, 2)
    folded = timm_rep.verify(model.reparameterize(), images(2, 32))
    assert (folded.passed, folded.folded) == (True, 0)


@pytest.mark.parametrize('damage', [1e-4, 1., float('nan')])
def test_a_broken_fold_of_one_layer(monkeypatch, damage):
    """The layer is named, and not the layers after it, whose inputs differ too."""
    model = randomize_(tiny('repa_vit_small', depth=3))
    target = model.blocks[1].mlp.fc1.weight.clone()
    fuse = RePaMlp.fuse

    def broken(self):
        deploy = fuse(self)
        if torch.equal(self.fc1.weight, target):
            with torch.no_grad():
                next(p for p in deploy.parameters() if p.ndim == 2).mul_(1 + damage)
        return deploy

    assert timm_rep.verify(model).passed
    monkeypatch.setattr(RePaMlp, 'fuse', broken)
    result = timm_rep.verify(model)
    assert not result.passed
    assert result.first_difference == 'blocks.1.mlp'
    assert 'first layer that differs: blocks.1.mlp, error against float64: unfolded' in str(result)
    assert str(result).endswith('\nFAILED')
    assert timm_rep.verify(model, tolerance=10.).passed == (damage < 10)


@pytest.mark.slow
def test_a_broken_fold_in_place(monkeypatch):
    """timm's blocks that fold themselves, and a difference that the outputs do not show."""
    torch.manual_seed(0)
    model = randomize_(timm.create_model('mobileone_s0', num_classes=5))
    nn.init.zeros_(model.head.fc.weight)
    target = model.stages[1][0].conv_kxk[0].conv.weight.clone()
    fold = MobileOneBlock.reparameterize

    def broken(self):
        hit = self.conv_kxk is not None and torch.equal(self.conv_kxk[0].conv.weight, target)
        fold(self)
        if hit:
            self.reparam_conv.bias.data += .01 * self.reparam_conv.bias.data.abs().max()

    x = images(1, 32)
    assert timm_rep.verify(model, x).passed
    monkeypatch.setattr(MobileOneBlock, 'reparameterize', broken)
    result = timm_rep.verify(model, x)
    assert result.folded_error <= 2 ** -23
    assert not result.passed
    assert result.first_difference == 'stages.1.0'


def test_default_tolerance():
    """16 times the unfolded error, or of the rounding of one number where the unfolded model happens to be exact."""
    eps = 2 ** -23
    for unfolded, folded, passed in [
        (0., 16 * eps, True), (0., 17 * eps, False), (100 * eps, 1600 * eps, True), (100 * eps, 1601 * eps, False)]:
        result = Verification(1, unfolded_error=unfolded, folded_error=folded, folded=1)
        assert result.passed == passed
        result = Verification(1, folded=1, layers={'a': (unfolded, folded)})
        assert (result.passed, result.first_difference) == (passed, None if passed else 'a')


def test_tolerance():
    model = randomize_(tiny('repa_deit_tiny'))
    assert not timm_rep.verify(model, tolerance=0.).passed
    assert timm_rep.verify(model, tolerance=1e-5).passed
    for tolerance in (-1., float('nan')):
        with pytest.raises(ValueError, match='tolerance must be'):
            timm_rep.verify(model, tolerance=tolerance)
    for x in (torch.zeros(3, 32, 32), torch.zeros(0, 3, 32, 32), torch.full((1, 3, 32, 32), float('inf'))):
        with pytest.raises(ValueError, match='images must be'):
            timm_rep.verify(model, x)
    with pytest.raises(ValueError, match='Expected a pretrained_cfg'):
        timm_rep.verify(nn.Conv2d(3, 3, 1))


def causes(model, *args):
    result = timm_rep.verify(model, *args)
    assert all(f'\n{name}: ' in str(result) for name in result.causes)
    return set(result.causes)


def test_other_outputs_in_train_mode():
    """Token labels, for which there is no difference to tell."""
    model = randomize_(tiny('repa_lvvit_s')).train()
    model.set_token_labeling()
    result = timm_rep.verify(model)
    assert set(result.causes) == {'train mode'}
    assert 'inf' not in result.causes['train mode']


def test_train_mode_is_a_cause():
    model = randomize_(tiny('repa_deit_tiny'))
    assert causes(model) == set()
    before = copy.deepcopy(model.train())
    state = torch.get_rng_state()
    assert causes(model) == {'train mode'}
    assert same_weights(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    model.eval().blocks[1].mlp.norm1.train()  # a single layer
    assert causes(model) == {'train mode'}
    model.eval().blocks[0].attn.train()  # where the mode does not matter
    assert causes(model) == set()
    mixed = randomize_(tiny('repa_deit_tiny'))
    mixed.norm.train()
    assert causes(mixed) == set()


@pytest.mark.parametrize('name', ['repa_deit_tiny', 'repopt_vgg_a0'])
def test_moved_statistics_are_a_cause(name):
    """Measured on the given images, not on random ones, which no model was trained on."""
    model = tiny(name)
    x = 2 * images(16, 32 if name == 'repa_deit_tiny' else 64) + 1
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, -1, 1)
            nn.init.normal_(module.bias)
    timm_rep.calibrate_batchnorm(model, [x])
    model.eval()
    assert causes(model, x) == set()
    if name == 'repopt_vgg_a0':  # before any LayerNorm
        assert causes(model, x * 30) == {'BatchNorm statistics'}  # not normalized
    norm = next(module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    before = norm.running_mean.clone()
    norm.running_mean += 10 * norm.running_var.sqrt()
    assert causes(model, x) == {'BatchNorm statistics'}
    assert causes(model) == set()
    norm.running_mean.copy_(before)
    norm.running_var *= 100
    assert causes(model, x) == {'BatchNorm statistics'}


@torch.no_grad()
def test_float16_overflow_is_a_cause():
    model = randomize_(tiny('repopt_vgg_a0'))
    assert causes(copy.deepcopy(model).half()) == set()
    _, _, norm, following, *_ = (m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.weight.fill_(300.)
    norm.bias.fill_(300.)
    norm.running_var.fill_(1e-6)
    assert causes(model) == set()  # in float32
    assert causes(copy.deepcopy(model).half()) == {'float16 overflow'}
    norm.running_var.fill_(1.)
    norm.running_mean.zero_()
    norm.weight.zero_()
    norm.bias.fill_(60000.)
    following.weight.fill_(500.)  # outputs overflow, weights do not
    following.running_mean.zero_()
    model.empty = nn.Parameter(torch.zeros(0))
    assert causes(copy.deepcopy(model).half()) == {'float16 overflow'}


def test_hooks_that_folding_drops(tmp_path):
    """timm alone drops the hooks of the layers that it removes."""
    torch.manual_seed(0)
    model = randomize_(FAMILIES['byobnet, RepVGG']())
    block = model.stages[0][0]
    handle = block.conv_kxk.conv.register_forward_hook(lambda module, args, y: 2 * y)
    x, keys = images(1, 32), model.state_dict().keys()
    for fold, args in (
            (timm_rep.convert.reparameterize, ()), (timm_rep.verify, (x,)),
            (timm_rep.export, (tmp_path / 'model.pt2', 'pt2', True, x))):
        with pytest.raises(ValueError, match=r'stages\.0\.0\.conv_kxk\.conv must have no hooks'):
            fold(model, *args)
        assert model.state_dict().keys() == keys
    handle.remove()
    handle = block.conv_kxk.conv.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with pytest.raises(ValueError, match=r'stages\.0\.0\.conv_kxk\.conv must have no hooks'):
        timm_rep.convert.reparameterize(model)
    assert model.state_dict().keys() == keys
    handle.remove()
    seen = []
    for module in (block, block.act, model.head.fc):  # folding keeps these
        module.register_forward_hook(lambda *args: seen.append(1))
    assert timm_rep.verify(model, x).passed
    seen.clear()
    timm_rep.convert.reparameterize(model)(x)
    assert len(seen) == 3
    model = randomize_(tiny('repa_deit_tiny'))
    model.blocks[0].mlp.fc1.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r'blocks\.0\.mlp cannot be folded: .* hooks'):
        timm_rep.verify(model)


@pytest.mark.parametrize('capability, cudnn, matmul, found', [
    ((8, 0), True, False, ['cudnn']), ((9, 0), True, True, ['cudnn', 'matmul']), ((8, 0), False, False, []),
    ((7, 5), True, True, [])])
def test_tf32_is_a_cause(monkeypatch, capability, cudnn, matmul, found):
    """Told of a model on a GPU, which this machine need not have."""
    class OnGpu:
        device = torch.device('cuda', 0)

    model = nn.Linear(1, 1)
    model.state_dict = lambda: {'weight': OnGpu()}
    monkeypatch.setattr('torch.cuda.get_device_capability', lambda device: capability)
    monkeypatch.setattr('torch.backends.cudnn.allow_tf32', cudnn)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('high' if matmul else 'highest')
    try:
        text = _tf32(model)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [name for name in ('cudnn', 'matmul') if f'{name}.allow_tf32' in text] == found
    assert _tf32(nn.Linear(1, 1)) == ''


SETTINGS = {
    'pass': (False, True),
    "torch.set_float32_matmul_precision('high')": (True, True),
    "torch.set_float32_matmul_precision('medium')": (True, True),
    'torch.backends.cuda.matmul.allow_tf32 = True': (True, True),
    'torch.backends.cudnn.allow_tf32 = False': (False, False),
}
if hasattr(torch.backends.cuda.matmul, 'fp32_precision'):  # torch 2.9
    SETTINGS.update({
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'": (True, True),
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'": (False, False),
        "torch.backends.fp32_precision = 'tf32'": (True, True),
    })


@pytest.mark.slow
def test_settings_of_tf32():
    """Each in a process of its own that has read none before: torch refuses some mixtures."""
    code = """
import json, os, sys, torch
from timm_rep._causes import _convolution_uses_tf32, _matmul_uses_tf32
for code in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(code)
        print(json.dumps([code, [_matmul_uses_tf32(), _convolution_uses_tf32()]]), flush=True)
        os._exit(0)
    os.wait()
"""
    out = subprocess.run(
        [sys.executable, '-c', code, json.dumps(list(SETTINGS))], check=True, capture_output=True, text=True).stdout
    found = dict(map(json.loads, out.splitlines()))
    assert {code: tuple(answer) for code, answer in found.items()} == SETTINGS


@torch.no_grad()
def test_extreme_statistics():
    """Statistics of any finite size fold; a layer that does not fold, or computes no numbers, is named."""
    for name in ('repa_deit_tiny', 'repopt_vgg_a0'):
        model = randomize_(tiny(name))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.mul_(1e6)
                module.running_var.mul_(1e12)
        assert timm_rep.verify(model).passed

    model = randomize_(tiny('repa_deit_tiny'))
    model.blocks[1].mlp.norm1.running_var.neg_()
    with pytest.raises(ValueError, match=r'outputs of blocks\.1\.mlp\.norm1 must be finite.* before any folding'):
        timm_rep.verify(model)
    model = randomize_(tiny('repa_deit_tiny'))
    model.blocks[0].attn.proj.weight[0, 0] = float('nan')
    with pytest.raises(ValueError, match=r'outputs of blocks\.0\.attn\.proj must be finite'):
        timm_rep.verify(model)
    model = randomize_(tiny('repa_deit_tiny'))
    model.blocks[1].mlp.norm1.running_mean = model.blocks[1].mlp.norm1.running_var = None
    with pytest.raises(ValueError, match=r'blocks\.1\.mlp cannot be folded: .*running statistics'):
        timm_rep.verify(model)
    model = tiny('repopt_vgg_a0')
    nn.init.zeros_(model.stem.conv[1].weight)  # the inputs of the next block are 0, so that its outputs are finite
    model.stages[0][0].conv[0].weight.fill_(1e20)
    model.stages[0][0].conv[1].weight.fill_(1e20)
    with pytest.raises(ValueError, match=r'stages\.0\.0\.conv cannot be folded: The folded weight .* got 1e\+40'):
        timm_rep.verify(model)


class TestCommand:
    def test_checkpoint_and_images(self, tmp_path, capsys):
        torch.save({'state_dict': randomize_(tiny('repa_deit_tiny')).state_dict()}, tmp_path / 'c.pth')
        for i in range(5):
            (tmp_path / 'val' / str(i % 2)).mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (40, 40), (50 * i, 10, 90)).save(tmp_path / 'val' / str(i % 2) / f'{i}.png')
        command = ['verify', 'repa_deit_tiny', '--checkpoint', str(tmp_path / 'c.pth'), *ARGS]
        assert main([*command, '--data-dir', str(tmp_path), '--images', '3']) == 0
        out = capsys.readouterr().out
        for kind in ('random', 'real'):
            assert f'repa_deit_tiny, {kind} images: 2 folded layers, 3 images\n' in out
        assert out.count('\npassed\n') == 2
        assert main([*command, '--tolerance', '0']) == 1
        assert '\nFAILED\n' in capsys.readouterr().out

        assert main([*command, '--data-dir', str(tmp_path), '--val-split', 'test']) == 1
        assert "no folder for the split 'test'" in capsys.readouterr().err
        assert main(command[:4]) == 1
        assert f'fits the model, but got {str(tmp_path / "c.pth")!r}' in capsys.readouterr().err

    def test_causes_are_of_the_model_and_real_images(self, tmp_path, capsys):
        """The model is in eval mode; running statistics are compared with those of real images only."""
        model = tiny('repa_deit_tiny')
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm1d)):
            norm.running_mean.fill_(50.)
        torch.save(model.state_dict(), tmp_path / 'c.pth')
        for label in 'ab':
            (tmp_path / 'val' / label).mkdir(parents=True)
            Image.effect_noise((32, 32), 50).convert('RGB').save(tmp_path / 'val' / label / 'a.png')
        main(['verify', 'repa_deit_tiny', '--checkpoint', str(tmp_path / 'c.pth'), '--data-dir', str(tmp_path), *ARGS])
        random, real = capsys.readouterr().out.split('real images:')
        assert 'folded layers' in random
        assert 'BatchNorm statistics:' not in random
        assert 'BatchNorm statistics:' in real
        assert 'train mode:' not in random + real

    @pytest.mark.parametrize('failing,status', [(None, 0), (0, 1), (1, 1)])
    def test_each_kind_of_images_counts(self, tmp_path, monkeypatch, failing, status):
        for i, red in enumerate((0, 80, 50, 20, 150, 40, 10)):
            (tmp_path / 'val' / str(i // 4)).mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (32, 32), (red, 10, 90)).save(tmp_path / 'val' / str(i // 4) / f'{i}.png')
        seen = []

        def verify(model, x, tolerance):
            seen.append(x)
            return Verification(len(x), folded=1, folded_error=float(len(seen) - 1 == failing), tolerance=.5)

        monkeypatch.setattr('timm_rep.cli.verify.verify', verify)
        assert main(['verify', 'repa_deit_tiny', '--data-dir', str(tmp_path), '--images', '3', *ARGS]) == status
        random, real = seen
        assert (random.shape, real.shape) == ((3, 3, 32, 32), (3, 3, 32, 32))
        red = real[:, 0].mean((1, 2))
        torch.testing.assert_close((red - red[0]) / (red[1] - red[0]), torch.tensor([0., 1., 3.]))  # images 0, 2 and 4

    def test_broken(self, capsys, monkeypatch):
        fuse = RePaMlp.fuse

        def broken(self):
            deploy = fuse(self)
            for p in deploy.parameters():
                p.data.mul_(2)
            return deploy

        monkeypatch.setattr(RePaMlp, 'fuse', broken)
        assert main(['verify', 'repa_deit_tiny', '--images', '1', *ARGS]) == 1
        assert 'first layer that differs: blocks.0.mlp,' in capsys.readouterr().out

    def test_other_models(self, capsys):
        args = ['verify', 'deit3_small_patch16_224', '--images', '1', *ARGS]
        assert main(args) == 0
        assert capsys.readouterr().out == 'deit3_small_patch16_224, random images: nothing to fold\n'
        assert main([*args, '--convert-to-repa', 'idle_ratio=0.5']) == 0
        assert '2 folded layers, 1 images' in capsys.readouterr().out


def test_compiled_and_empty_models():
    model = randomize_(tiny('repa_deit_tiny'))
    x = images(2, 32)
    assert timm_rep.verify(torch.compile(model, backend='eager'), x).max_difference == timm_rep.verify(
        model, x).max_difference
    with pytest.raises(ValueError, match='meta'):
        timm_rep.verify(tiny('repa_deit_tiny', device='meta'), x)
