import copy
import io
import json
import pickle
import re
import warnings
from functools import partial

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import LayerNorm2d, Mlp
from timm.models.vision_transformer import ParallelScalingBlock
from timm.utils import reparameterize_model
from torch.overrides import TorchFunctionMode

import timm_rep
from tests.convert.families import VIT, build
from tests.helpers import images, needs_recorded_args, needs_torch_2_6, relative, same_weights, save_model
from timm_rep.convert import ConvertedFfn, budget, linearize_ffns
from timm_rep.convert.budget import allocate
from timm_rep.convert.calibration import CalibrationImages
from timm_rep.convert.ffn import find_ffns
from timm_rep.convert.least_squares import LeastSquares, Moments
from timm_rep.convert.linearize import check_convertible
from timm_rep.layers import Affine, RePaMlpDeploy
from timm_rep.utils.modes import default_dtype
from timm_rep.utils.profiling import count_macs


def vit(seed=0, **kwargs):
    torch.manual_seed(seed)
    args = {**VIT, 'num_classes': 5, **kwargs}
    model = timm.create_model('vit_tiny_patch16_224', **args)
    model._model_args = args  # timm records them since 1.0.31
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # away from the linear range of the activation
    return model.eval()


def all_hooks(model):
    return [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


class Unchanged:
    """Checks that a model is as it was."""

    def __init__(self, model):
        self.model, self.repr = model, repr(model)
        self.state = copy.deepcopy(model.state_dict())
        self.modules = list(model.modules())
        self.modes = [m.training for m in self.modules]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        assert repr(self.model) == self.repr
        assert self.state.keys() == self.model.state_dict().keys()
        assert all(torch.equal(v.nan_to_num(), self.state[k].nan_to_num()) for k, v in self.model.state_dict().items())
        assert list(self.model.modules()) == self.modules
        assert [m.training for m in self.modules] == self.modes
        assert not all_hooks(self.model)


@pytest.mark.parametrize('kind', ['tensors', 'pairs', 'dicts', 'one-shot', 'uneven'])
def test_forms_of_the_loader(kind):
    x, model = images(24, 32), vit()
    loader = {
        'tensors': [x[:12], x[12:]],
        'pairs': [(x[:12], torch.arange(12)), [x[12:], torch.arange(12)]],
        'dicts': [{'image': x[:12], 'label': torch.arange(12)}, {'image': x[12:], 'label': torch.arange(12)}],
        'one-shot': iter(x.split(12)),
        'uneven': [x[:0], x[:1], x[1:8], x[8:].double()],
    }[kind]
    report = linearize_ffns(model, loader)
    expected = vit()
    linearize_ffns(expected, [x])
    assert report.images == 24
    assert relative(model(x), expected(x)) < 1e-4


def deploys(model):
    return [m for m in model.modules() if isinstance(m, RePaMlpDeploy)]


Square = type('Square', (nn.Module,), {'forward': lambda self, x: x ** 2})  # symmetric: a line explains nothing


@pytest.mark.parametrize('idle_ratio', [.75, 1.])
@pytest.mark.parametrize('act,matrices', [(nn.GELU, 3), (nn.Hardtanh, 3), (Square, 2)])
def test_two_matrices_where_a_linear_path_gains_nothing(act, matrices, idle_ratio, tmp_path):
    model, x = vit(depth=2), images(16, 32)  # too few to hold some out
    for block in model.blocks:
        block.mlp.act = act()
        nn.init.zeros_(block.mlp.fc1.bias)
    original = copy.deepcopy(model)
    report = timm_rep.convert_to_repa(model, idle_ratio, calibration=[x], ridge=1e-9)
    assert {ffn.matrices for ffn in report.ffns} == {matrices if idle_ratio < 1 or matrices == 2 else 1}
    assert [ffn.linear_path for ffn in report.ffns] == [matrices == 3] * 2
    # 24 or none of 96 channels active; the path of 24 x 24 costs as much as 12 channels
    active = 24 if idle_ratio < 1 else 0
    counts = {3: active, 2: active + 12}
    assert [ffn.active_features for ffn in report.ffns] == [counts[matrices]] * 2
    assert [m.has_idle for m in deploys(model)] == [matrices == 3] * 2
    assert report.macs[1] == count_macs(model, (3, 32, 32)).total
    assert len({ffn.macs[1] for ffn in report.ffns}) == 1
    for ffn in report.ffns:
        assert ffn.macs[1] == ffn.macs[0] * counts[2] // 96
        assert ffn.idle_ratio == 1 - ffn.active_features / 96
    # the better of both forms
    u = []
    hook = original.blocks[0].mlp.register_forward_pre_hook(lambda _, args: u.append(args[0].flatten(0, 1).double()))
    original(x)
    hook.remove()
    mlp = copy.deepcopy(original.blocks[0].mlp).double()
    with torch.no_grad():
        g = mlp.act(mlp.fc1(u[0]))
        moments = torch.cat([g, u[0]], 1)
        seen = Moments(moments[0])
        seen.add(moments)
        problem = LeastSquares(Affine.from_linear(mlp.fc2), seen, 24)
    errors = {}
    for n, count in counts.items():
        kept = problem.elimination(1e-9, n == 3).order[96 - count:].sort().values
        errors[n], = problem.losses(problem.solve(kept, 1e-9, n == 3))
    assert min(errors, key=errors.get) == matrices
    assert report.ffns[0].lost_variance == pytest.approx(problem.share(errors[matrices]), rel=1e-3)

    # as the registered architecture
    if matrices == 2:
        assert model._model_args['linear_path'] is False
        save_model(model, tmp_path)
        loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
        assert [m.has_idle for m in deploys(loaded)] == [False] * 2
        assert same_weights(loaded, model)  # the activation was replaced by hand


def test_more_channels_than_there_are_stay_all():
    model, x = vit(depth=2), images(64, 32)
    before = model(x)
    report = linearize_ffns(model, [x], idle_ratio=.05)  # three matrices would be slower
    assert [ffn.matrices for ffn in report.ffns] == [2] * 2
    assert [ffn.lost_variance for ffn in report.ffns] == pytest.approx([0] * 2, abs=1e-9)
    assert report.macs[0] == report.macs[1]
    assert relative(model(x), before) < 1e-5


def test_number_of_images():
    x, model = images(40, 32), vit()

    def endless():
        while True:
            yield x[:16]

    assert linearize_ffns(model, endless(), max_images=24).images == 24
    assert linearize_ffns(vit(depth=1), [images(600, 32)]).images == 600
    for max_images in (0, -1):
        with Unchanged(model := vit()), pytest.raises(ValueError, match='max_images'):
            linearize_ffns(model, [x], max_images=max_images)
    # the number that suffices for all FFNs, not for the first
    model = timm.create_model('convnext_atto', depths=(1, 1, 1, 1), dims=(16, 24, 32, 40), num_classes=5)
    message = r'at least 41 images for stages\.2\.blocks\.0\.mlp, with 160 .* 4 tokens .*got 1'
    with pytest.raises(ValueError, match=message):
        linearize_ffns(model, [x[:1]])


@pytest.mark.parametrize('loader, error, message', [
    ([], ValueError, 'loader with images'),
    ([torch.zeros(0, 3, 32, 32)], ValueError, 'loader with images'),
    ('data', TypeError, r"Expected an iterable of batches .* got 'data'"),
    (torch.zeros(8, 3, 32, 32), TypeError, r'Expected an iterable .* got a tensor \(8, 3, 32, 32\)'),
    (5, TypeError, r'Expected an iterable .* got 5'),
    ([{'a': 1}], TypeError, 'batch'),
    ([['a', 1]], TypeError, 'batch'),
    ([torch.zeros(3, 32, 32)], ValueError, r'shape \(N, C, H, W\), got \(3, 32, 32\)'),
    # 24 + 96 channels, 17 tokens
    ([torch.zeros(7, 3, 32, 32)], ValueError, r'at least 8 images for blocks\.0\.mlp, with 120 .* 17 tokens .*got 7'),
    ([torch.zeros(64, 3, 32, 32, dtype=torch.uint8)], TypeError, r'uint8: normalize'),
    ([torch.full((8, 3, 32, 32), torch.nan)], ValueError, r'blocks\.0\.mlp must be finite'),
    ([torch.full((8, 3, 32, 32), torch.inf)], ValueError, r'blocks\.0\.mlp must be finite'),
    ([images(8, 32), images(8, 48)], AssertionError, 'height'),
])
def test_refused_loaders(loader, error, message):
    with Unchanged(model := vit()), pytest.raises(error, match=message):
        linearize_ffns(model, loader)


@pytest.mark.parametrize('kwargs, message', [
    (dict(idle_ratio=1.1), 'idle_ratio'),
    (dict(idle_ratio=-.1), 'idle_ratio'),
    (dict(idle_ratio=float('nan')), 'idle_ratio'),
    (dict(idle_ratio=[.5]), r'2 FFNs.* 1: blocks\.0\.mlp, blocks\.1\.mlp'),
    *((dict(idle_ratio=[.5, ratio]), 'idle_ratio') for ratio in ('x', '0.5', True)),
    (dict(idle_ratio=True), 'idle_ratio'),
    *((dict(idle_ratio=ratio), 'idle_ratio') for ratio in ('0.5', {'blocks.0.mlp': .5})),
    (dict(macs='a'), "macs .*got 'a'"),
    *((dict(max_images=count), 'max_images must be') for count in (None, 1.5)),
    *((dict(ridge=ridge), 'ridge') for ridge in (0., -1., float('nan'), float('inf'), 'a', None)),
    (dict(macs=0.), 'macs'),
    (dict(macs=1.), 'macs'),
    (dict(macs=.5, idle_ratio=.75), 'idle_ratio or macs'),
    (dict(macs=.3), r'macs must be at least about 0\.\d+,.* got 0\.3'),
])
def test_refused_arguments(kwargs, message):
    with Unchanged(model := vit()), pytest.raises(ValueError, match=message):
        linearize_ffns(model, [images(16, 32)], **kwargs)


def test_a_ridge_too_small_for_images_that_repeat():
    with Unchanged(model := vit()), pytest.raises(ValueError, match=r'ridge must be large enough.* got 1e-300'):
        linearize_ffns(model, [images(2, 32).repeat(16, 1, 1, 1)], ridge=1e-300)


def test_kinds_of_ratios():
    """Numbers of NumPy and torch; None for an FFN that stays."""
    ratios = .5, np.float32(.5), np.array([.5, .5]), torch.tensor(.5), torch.tensor([.5, .5]), (.5, .5)
    models = [vit() for _ in ratios]
    for model, ratio in zip(models, ratios):
        linearize_ffns(model, [images(16, 32)], ratio)
        assert same_weights(models[0], model)
    report = linearize_ffns(model := vit(), [images(16, 32)], [None, .5])
    assert [ffn.name for ffn in report.ffns] == ['blocks.1.mlp']
    assert report.kept == {'blocks.0.mlp': 'has no idle ratio'}
    assert same_weights(model.blocks[0], vit().blocks[0])
    with pytest.raises(ValueError, match='idle_ratio must'):
        linearize_ffns(vit(), [images(16, 32)], [None, None])


def test_a_model_without_weights():
    with torch.device('meta'), pytest.raises(ValueError, match=r'weights, but .* is on the meta device'):
        linearize_ffns(vit(), [torch.zeros(16, 3, 32, 32, device='cpu')])


@pytest.mark.parametrize('layer', ['norm2', 'mlp.fc1', 'mlp.fc2'])
@pytest.mark.parametrize('name', ['weight', 'bias'])
def test_weights_that_are_not_finite(layer, name):
    model = vit()
    with torch.no_grad():
        getattr(model.blocks[1].get_submodule(layer), name).flatten()[3] = torch.nan
    with Unchanged(model), pytest.raises(ValueError, match=r'blocks\.1\.mlp'):
        linearize_ffns(model, [images(16, 32)])


def test_statistics_that_are_not_finite():
    model, x = build('RepVitMlp: repvit')
    name = find_ffns(model)[0][-1].name
    model.get_submodule(name).conv2.bn.running_var[0] = torch.nan
    with Unchanged(model), pytest.raises(ValueError, match=name.replace('.', r'\.')):
        linearize_ffns(model, [x])


def test_an_error_in_the_middle_changes_nothing(monkeypatch):
    model, x = build('ConvMlp: fastvit')  # its FFNs have a layer that stays
    model.train()
    model.stages[0].eval()
    solve, calls = LeastSquares.solve, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return solve(*args)

    monkeypatch.setattr(LeastSquares, 'solve', interrupted)
    with Unchanged(model), pytest.raises(KeyboardInterrupt):
        linearize_ffns(model, [x])


@pytest.mark.parametrize('mode', [True, False])
def test_modes_are_left(mode):
    model, x = build('ConvMlp: fastvit')
    model.train(mode)
    model.stages[1].train(not mode)
    modes = {name: m.training for name, m in model.named_modules()}
    statistics = {k: v.clone() for k, v in model.state_dict().items() if 'running' in k or 'num_batches' in k}
    report = linearize_ffns(model, [x])
    assert all(m.training == modes[name] for name, m in model.named_modules() if name in modes)
    for ffn in report.ffns:
        assert all(m.training == modes[ffn.name] for m in model.get_submodule(ffn.name).modules())
    state = model.state_dict()
    assert sum(torch.equal(v, state[k]) for k, v in statistics.items() if k in state) > 10
    assert all(torch.equal(v, state[k]) for k, v in statistics.items() if k in state)
    assert not all_hooks(model)


def test_frozen_weights_stay_frozen():
    model = vit()
    model.blocks[0].mlp.requires_grad_(False)
    model.blocks[1].mlp.fc1.requires_grad_(False)
    linearize_ffns(model, [images(16, 32)])
    first, second = (block.mlp for block in model.blocks)
    assert not any(p.requires_grad for p in first.parameters())
    assert {name: p.requires_grad for name, p in second.named_parameters()} == {
        'fc_in.weight': False, 'fc_in.bias': False,
        'fc_out.weight': True, 'fc_idle.weight': True, 'fc_idle.bias': True}
    assert model.head.weight.requires_grad


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-6), (torch.bfloat16, .1)])
def test_dtypes(dtype, tolerance):
    x, model, expected = images(16, 32), vit(), vit()
    report, other = linearize_ffns(expected, [x]), linearize_ffns(model.to(dtype), [x])
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert relative(model(x.to(dtype)).double(), expected(x).double()) < tolerance + 1e-4
    for a, b in zip(report.ffns, other.ffns):
        # the correction of the second one has the rounding errors of the stream
        assert a.lost_variance == pytest.approx(b.lost_variance, rel=.1, abs=.05)


def test_overflow_of_a_small_dtype():
    model = vit()
    with torch.no_grad():
        model.blocks[1].norm2.weight.mul_(1e-5)
        model.blocks[1].mlp.fc1.weight.mul_(1e5)
        model.blocks[1].mlp.fc2.weight.mul_(1e5)
    model.half()
    with Unchanged(model), pytest.raises(OverflowError, match='float16'):
        linearize_ffns(model, [images(16, 32)], idle_ratio=1.)


class LoRALinear(nn.Linear):
    def __init__(self, base):
        super().__init__(base.in_features, base.out_features)
        self.load_state_dict(base.state_dict())
        self.down, self.up = nn.Linear(base.in_features, 2, False), nn.Linear(2, base.out_features, False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


class Tagged(torch.Tensor):
    """A subclass, as quantized and distributed weights are."""


def _replace_weight(mlp):
    mlp.fc2.weight = nn.Parameter(mlp.fc2.weight.data.as_subclass(Tagged))


def _replace_forward(mlp):
    mlp.fc1.forward = lambda x: nn.Linear.forward(mlp.fc1, x) * 2


@pytest.mark.parametrize('change, reason', [
    (lambda mlp: setattr(mlp, 'fc1', LoRALinear(mlp.fc1)), 'LoRALinear where a linear layer is expected'),
    (lambda mlp: setattr(mlp, 'fc2', LoRALinear(mlp.fc2)), 'LoRALinear where a linear layer is expected'),
    (lambda mlp: setattr(mlp, 'fc2', nn.Sequential(mlp.fc2, nn.GELU())), 'Sequential where'),
    (lambda mlp: setattr(mlp, 'act', nn.Sequential(nn.Linear(96, 96))), 'parameters for every channel'),
    (lambda mlp: setattr(mlp, 'norm', nn.RMSNorm(96)), 'has a RMSNorm before its last linear layer'),
    (lambda mlp: nn.utils.parametrizations.weight_norm(mlp.fc1), 'ParametrizedLinear where'),
    pytest.param(_replace_weight, 'has a weight that is a Tagged of torch.float32', marks=needs_torch_2_6),
    (_replace_forward, 'a forward.. that was replaced'),
    (lambda mlp: mlp.fc1.register_forward_hook(lambda module, args, y: 2 * y), 'has hooks'),
    (lambda mlp: mlp.register_forward_pre_hook(lambda module, args: None), 'has hooks'),
])
def test_modified_ffns_stay(change, reason):
    x, model = images(16, 32), vit()
    mlp = model.blocks[0].mlp
    change(mlp)
    report = linearize_ffns(model, [x])
    assert model.blocks[0].mlp is mlp
    assert [ffn.name for ffn in report.ffns] == ['blocks.1.mlp']
    assert re.search(reason, report.kept['blocks.0.mlp'])
    assert f'blocks.0.mlp: {report.kept["blocks.0.mlp"]}' in str(report)

    model = vit()
    for block in model.blocks:
        change(block.mlp)
    with pytest.raises(ValueError, match=rf'nothing was changed: .*blocks\.0\.mlp.*{reason}.*blocks\.1\.mlp'):
        linearize_ffns(model, [x])


def test_kernels_that_are_not_pointwise_are_refused():
    mlp = Mlp(8, 16, use_conv=True)
    mlp.fc1 = nn.Conv2d(8, 16, 3, padding=1)
    assert find_ffns(nn.ModuleList([mlp]))[1] == {'0': 'has a Conv2d where a linear layer is expected'}


def test_quantized_layers_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        model = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear})
    with pytest.raises(ValueError, match=r'blocks\.0\.mlp has a torch.ao.nn.quantized'):
        linearize_ffns(model, [images(16, 32)])


@pytest.mark.parametrize('name, args, reason', [
    ('convnextv2_atto', dict(dims=(8, 8, 8, 8), depths=(1, 1, 1, 1)), 'global response norm'),
    ('pvt_v2_b0', {}, 'depthwise convolution'),
    ('gmlp_s16_224', {}, 'spatial gating unit'),
    ('efficientformerv2_s0', {}, 'convolution between'),
    ('vit_tiny_patch16_224', dict(VIT, block_fn=ParallelScalingBlock), 'with one matrix'),
    ('resnet18', {}, 'pointwise FFN, but ResNet has none'),
])
def test_architectures_without_pointwise_ffns(name, args, reason):
    with torch.device('meta'):
        model = timm.create_model(name, **args)
    before = repr(model)
    with pytest.raises(ValueError, match=reason):
        linearize_ffns(model, None)  # before the loader is touched
    assert repr(model) == before


def test_wrapped_compiled_and_converted_models():
    x = images(16, 32)
    features = timm.create_model('vit_tiny_patch16_224', features_only=True, out_indices=(0, 1), **VIT)
    for wrapped in (features, nn.DataParallel(vit()), torch.compile(vit())):
        with pytest.raises(ValueError, match='wraps another model'):
            linearize_ffns(wrapped, [x])
    with pytest.raises(TypeError, match='create_model'):
        linearize_ffns('vit_tiny_patch16_224', [x])
    model = vit()
    linearize_ffns(model, [x])
    with Unchanged(model), pytest.raises(ValueError, match='already'):
        linearize_ffns(model, [x])
    model = vit()
    model.compile(backend='eager')
    with pytest.raises(ValueError, match='compiled'):
        linearize_ffns(model, [x])
    model = vit()
    model.blocks[0].compile(backend='eager')
    with pytest.raises(ValueError, match='compiled'):
        linearize_ffns(model, [x])


def test_ffns_are_converted_in_order_of_execution():
    """The inputs of an FFN come from the converted ones before it, whatever their names."""
    class Backwards(nn.Sequential):
        def __iter__(self):
            return reversed(self._modules.values())

    model, other, x = vit(), vit(), images(16, 32)
    first, second = other.blocks
    other.blocks = Backwards(second, first)
    linearize_ffns(model, [x])
    assert [ffn.name for ffn in linearize_ffns(other, [x]).ffns] == ['blocks.1.mlp', 'blocks.0.mlp']
    assert all(same_weights(*blocks) for blocks in zip(model.blocks, other.blocks))


def test_ffns_of_one_token_and_unused_ones_stay():
    model, x = build('cait')
    one = [name for name, m in model.blocks_token_only.named_modules() if isinstance(m, Mlp)]
    report = linearize_ffns(model, [x])
    assert report.kept.keys() == {f'blocks_token_only.{name}' for name in one}
    assert all('one token' in reason for reason in report.kept.values())
    # nothing left to convert
    with pytest.raises(ValueError, match='already'):
        linearize_ffns(model, [x])
    model = vit()
    model.unused = Mlp(4, 8)
    report = linearize_ffns(model, [images(16, 32)])
    assert report.kept == {'unused': 'is not used in the forward pass'}
    model = vit()
    model.forward_features = lambda x, **kwargs: torch.zeros(len(x), 17, 24)
    with pytest.raises(ValueError, match=r'but blocks\.0\.mlp is not used'):
        linearize_ffns(model, [images(16, 32)])


@pytest.mark.parametrize('name, args, left', [
    ('vit_base_patch16_siglip_224', VIT, ['attn_pool.mlp']),
    ('maxxvit_rmlp_nano_rw_256', dict(img_size=64, embed_dim=(32,), depths=(1,), stem_width=8), [
        'stages.0.blocks.0.attn_block.attn.rel_pos.mlp', 'stages.0.blocks.0.attn_grid.attn.rel_pos.mlp']),
    ('vit_relpos_small_patch16_224', VIT, ['blocks.0.attn.rel_pos.mlp', 'blocks.1.attn.rel_pos.mlp']),
    ('vit_srelpos_small_patch16_224', VIT, ['shared_rel_pos.mlp']),
    ('swinv2_cr_tiny_224', dict(img_size=64, embed_dim=16, depths=(1,), num_heads=(2,)), [
        'stages.0.blocks.0.attn.meta_mlp']),
    ('mixer_s32_224', {}, [f'blocks.{i}.mlp_tokens' for i in range(8)]),
    ('gcresnet33ts', {}, None),
    pytest.param(
        'csatv2', dict(dims=(8,) * 4, depths=(1,) * 4, transformer_depths=(0,) * 4), None, marks=needs_recorded_args),
    ('vgg11', {}, None),
    ('caformer_s18', {}, []),
])
def test_other_mlps_are_left_alone(name, args, left):
    with torch.device('meta'):
        model = timm.create_model(name, **args)
    ffns, others = find_ffns(model)
    found = {ffn.name for ffn in ffns}
    assert not others
    if left is None:
        assert not found
        return
    assert found
    mlps = {name for name, m in model.named_modules() if type(m) is Mlp}
    assert mlps - found == set(left)


def test_hidden_layernorm_of_maps_is_refused():
    # LayerNorm2d is a subclass of LayerNorm with another dimension
    mlp = nn.ModuleList([Mlp(8, 16, norm_layer=LayerNorm2d, use_conv=True)])
    assert 'LayerNorm2d' in find_ffns(mlp)[1]['0']


@pytest.mark.parametrize('active, linear_path, matrices', [
    (8, True, 3), (8, False, 2), (0, True, 1), (0, False, 0), (32, True, 2), (32, False, 2)])
def test_number_of_matrices(active, linear_path, matrices):
    assert ConvertedFfn('mlp', 32, active, linear_path).matrices == matrices


def test_report():
    model, x = vit(), images(16, 32)
    original = copy.deepcopy(model)
    report = linearize_ffns(model, [x], idle_ratio=[.5, .75])
    assert [(f.name, f.hidden_features, f.active_features, f.idle_ratio) for f in report.ffns] == [
        ('blocks.0.mlp', 96, 48, .5), ('blocks.1.mlp', 96, 24, .75)]
    assert report.ffns[0].macs == (17 * 2 * 24 * 96, 17 * (2 * 24 * 48 + 24 * 24))
    assert report.macs == (count_macs(original).total, count_macs(model).total)
    saved = sum(f.macs[0] - f.macs[1] for f in report.ffns)
    assert report.macs[0] - report.macs[1] == saved
    assert json.loads(json.dumps(report.as_dict()))['ffns'][1]['active_features'] == 24
    text = str(report)
    assert all(part in text for part in ('blocks.1.mlp', '50%', '75%', '16 images'))


def test_macs_before_and_after_are_counted_with_class_tokens():
    # the first input of a layer is a view of a parameter
    model, x = build('cait')
    assert count_macs(model, x.shape[1:]).total > 0
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize('fraction', [.65, .8, .95])
def test_budget(fraction):
    model, x = vit(), images(16, 32)
    model.blocks[0].mlp.fc1.bias.data += 4  # nearly linear
    before = count_macs(model).total
    report = linearize_ffns(model, [x], macs=fraction)
    budget, channel = fraction * before, 17 * 2 * 24
    assert budget - channel < count_macs(model).total <= budget
    assert report.macs == (before, count_macs(model).total)
    linear, other = report.ffns
    assert linear.idle_ratio > other.idle_ratio


@pytest.mark.parametrize('dtype, autocast', [
    (torch.float16, None),
    pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
    pytest.param(torch.float32, torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_half_precision(dtype, autocast):
    """The residual streams are found, the budget is spent alike, and the outputs are nearly as close."""
    x, held_out = [images(128, 32)], images(64, 32, seed=2)
    model = vit(depth=3)
    with torch.no_grad():
        expected = model(held_out)
    errors, active = {}, {}
    for name, kwargs in ('ratio', dict(idle_ratio=.5)), ('macs', dict(macs=.75)):
        for half in False, True:
            converted = copy.deepcopy(model).to(dtype if half else torch.float32)
            kinds = {p.dtype for p in converted.parameters()}
            with torch.autocast('cpu', autocast, enabled=half and autocast is not None):
                report = linearize_ffns(converted, [x[0].to(*kinds)], **kwargs)
            assert {p.dtype for p in converted.parameters()} == kinds
            assert all(ffn.compensated for ffn in report.ffns)
            with torch.no_grad():
                errors[name, half] = (converted.float()(held_out) - expected).norm() / expected.norm()
            active[name, half] = torch.tensor([ffn.active_features for ffn in report.ffns])
        assert errors[name, True] < 1.1 * errors[name, False] + .01
    assert (active['macs', True] - active['macs', False]).abs().max() <= 6  # of 96


def test_a_budget_with_outputs_that_are_modified_in_place():
    """A layer scale or a shortcut that overwrites the output of an FFN changes nothing, also in a frozen model."""
    class Scale(nn.Module):
        def __init__(self, gamma, inplace):
            super().__init__()
            self.gamma, self.inplace = gamma, inplace

        def forward(self, x):
            return x.mul_(self.gamma) if self.inplace else x * self.gamma

    found = []
    for inplace, frozen in (False, False), (True, False), (True, True):
        model = vit(init_values=1.).requires_grad_(not frozen)
        for block, gamma in zip(model.blocks, (1., .01)):
            block.ls2 = Scale(gamma, inplace)
        report = linearize_ffns(model, [images(16, 32)], macs=.7)
        found.append([ffn.active_features for ffn in report.ffns])
    assert found[0] == found[1] == found[2]
    assert found[0][0] > found[0][1] + 20


def test_generators_and_tensors_are_on_the_same_device():
    """Random numbers are drawn on the CPU, also where the default device is another one, which has no such tensors."""
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            method = any(isinstance(x, torch.Tensor) and x.device.type == 'cpu' for x in args)
            assert kwargs.get('generator') is None or kwargs.get('device') == 'cpu' or method
            return function(*args, **kwargs)

    model, x = vit(), images(16, 32)
    with Refusing():
        linearize_ffns(model, [x], macs=.8)


def test_a_model_that_does_not_say_its_classes():
    model = vit()
    model.num_classes = None
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        linearize_ffns(model, [images(200, 32)], idle_ratio=.5)


@pytest.mark.parametrize('weak', [0, 1])
def test_a_budget_goes_where_the_outputs_need_it(weak):
    model = vit(init_values=1.)
    model.blocks[weak].ls2.gamma.data.mul_(.01)
    ratios = [ffn.idle_ratio for ffn in linearize_ffns(model, [images(16, 32)], macs=.7).ffns]
    assert ratios[weak] > ratios[1 - weak] + .2


def test_budget_with_two_matrices(monkeypatch):
    """The 12 channels that cost as much as a linear path, of 24 x 24, are idle without a loss."""
    curves = []
    monkeypatch.setattr(budget, 'allocate', lambda losses, *args: curves.extend(losses) or allocate(losses, *args))
    model = vit()
    for block in model.blocks:
        block.mlp.act = Square()
        nn.init.zeros_(block.mlp.fc1.bias)
    linearize_ffns(model, [images(16, 32)], macs=.8, ridge=1e-9)
    assert len(curves) == 2
    for loss in curves:
        assert (loss[:13] == loss[0]).all()
        assert (loss[13:].diff() > 0).all()
        assert loss[13] > loss[0]


def test_the_other_form_is_the_best_of_its_dampings(monkeypatch):
    seen, losses = [], LeastSquares.losses

    def spied(self, fits):
        found = losses(self, fits)
        seen.extend((fit.linear_path, loss) for fit, loss in zip(fits, found))
        return found

    monkeypatch.setattr(LeastSquares, 'losses', spied)
    reports = linearize_ffns(vit(), [images(200, 32)], idle_ratio=.7).ffns
    for i, ffn in enumerate(reports):
        *compared, _, _ = seen[i * len(seen) // len(reports):(i + 1) * len(seen) // len(reports)]
        least = {path: min(loss for form, loss in compared if form is path) for path in (False, True)}
        assert len(compared) > 4
        assert ffn.other_held_out / ffn.held_out == pytest.approx(least[not ffn.linear_path] / least[ffn.linear_path])


def test_metric_of_the_logits(monkeypatch):
    """The Fisher information of logits is diag(p) - p p^T, with p the probabilities that classes are drawn with."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp(4, 8, 3)

        def forward(self, x):
            return self.mlp(x.flatten(1)[:, None])[:, 0]

    p, model = torch.tensor([.8, .15, .05]), Net().eval().requires_grad_(False)
    model.mlp.fc2.weight.zero_()
    model.mlp.fc2.bias.copy_(p.log())
    monkeypatch.setattr(budget, '_IMAGES', 4000)
    root = budget.output_metrics(model, find_ffns(model)[0], CalibrationImages([torch.zeros(4000, 1, 2, 2)], p))['mlp']
    torch.testing.assert_close(root.T @ root, (p.diag() - p[:, None] * p).double(), rtol=0, atol=.012)


def test_metric_of_several_outputs():
    """The information of all outputs is added, so FFNs behind the place where the first one branches off count."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Mlp(4, 8, 4), Mlp(4, 8, 4)
            self.early, self.late, self.other = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x, **given):
            x = x + given.get('first', self.first(x))
            y = x + given.get('second', self.second(x))
            return {'early': self.early(x), 'constant': x.new_zeros(len(x)), 'late': [self.late(y), self.other(y)]}

    torch.manual_seed(0)
    model = Net().double().eval().requires_grad_(False)
    x = images(20, 2)[:, 0].flatten(1).double()
    roots = budget.output_metrics(model, find_ffns(model)[0], CalibrationImages([x], x))
    hidden = {'first': x, 'second': x + model.first(x)}
    for name, root in roots.items():
        def outputs(y, name=name):
            found = model(x, **{name: y})
            return torch.stack([found['early'], *found['late']]).sum(1)[:, 0]  # rows are independent

        jacobian = torch.autograd.functional.jacobian(outputs, getattr(model, name)(hidden[name])).flatten(0, 1)
        expected = jacobian.T @ jacobian / len(x)
        expected += 1e-3 * expected.diagonal().mean() * torch.eye(4)
        torch.testing.assert_close(root.T @ root, expected)


def test_budget_of_a_model_with_one_output():
    report = linearize_ffns(vit(num_classes=1), [images(16, 32)], macs=.8)
    assert all(ffn.idle_ratio < 1 for ffn in report.ffns)


class Returning(nn.Module):
    """A model whose outputs are put into something else."""

    def __init__(self, model, returned):
        super().__init__()
        self.model, self.returned = model, returned

    def forward(self, x):
        return self.returned(self.model(x))


def test_budget_by_the_logits_of_each_image():
    """Outputs that are not tensors, have one value for all images, or are classes instead of logits are skipped."""
    loader = [images(16, 32)]
    expected = linearize_ffns(vit(), loader, macs=.7)
    found = linearize_ffns(Returning(vit(), lambda y: {
        'loss': None, 'entropy': y.mean(), 'classes': y.argmax(1), 'logits': y[:, :, None], 'means': y.mean(0),
    }), loader, macs=.7)
    assert [ffn.active_features for ffn in found.ffns] == [ffn.active_features for ffn in expected.ffns]


def test_budget_of_outputs_without_gradients():
    """They do not say which FFNs matter."""
    with pytest.raises(TypeError, match='differentiable'):
        linearize_ffns(Returning(vit(), torch.Tensor.detach), [images(16, 32)], macs=.7)


def test_budget_of_a_model_that_returns_no_class_dimension():
    report = linearize_ffns(Returning(vit(), lambda y: y[:, 0]), [images(16, 32)], macs=.8)
    assert all(ffn.idle_ratio < 1 for ffn in report.ffns)


def test_budget_with_outputs_that_are_not_finite():
    """A class that is ruled out by -inf is accepted; NaN is an error."""
    loader = [images(16, 32)]

    def ruled_out(y):
        return torch.cat([y[:, :1] - torch.inf, y[:, 1:]], 1)

    assert linearize_ffns(Returning(vit(), ruled_out), loader, macs=.7).macs is not None
    with Unchanged(model := Returning(vit(), lambda y: y * torch.nan)), pytest.raises(ValueError, match='finite'):
        linearize_ffns(model, loader, macs=.7)
    linearize_ffns(model, loader)


def test_a_budget_needs_an_output_of_each_image():
    model = Returning(vit(), lambda y: {'loss': y.mean(), 'classes': y.argmax(1).tolist()})
    with Unchanged(model), pytest.raises(TypeError, match='but got dict'):
        linearize_ffns(model, [images(16, 32)], macs=.8)
    linearize_ffns(model, [images(16, 32)])


def test_larger_budgets_lose_less():
    idle, lost = [], []
    for fraction in (.65, .75, .85, .95):
        report = linearize_ffns(vit(), [images(16, 32)], macs=fraction)
        idle.append(sum(f.hidden_features - f.active_features for f in report.ffns))
        lost.append(report.ffns[0].lost_variance)  # the first FFN has the same input as in the original model
    assert idle == sorted(idle, reverse=True)
    assert lost == sorted(lost, reverse=True)
    assert len(set(lost)) > 2


def test_budget_of_gated_ffns_that_see_several_sizes():
    model, x = build('GluMlp, gates first: vision_transformer')
    before = count_macs(model).total
    linearize_ffns(model, [x], macs=.7)
    assert .7 * before - 17 * 3 * 24 < count_macs(model).total <= .7 * before


@pytest.mark.parametrize('family', [
    'Mlp: vision_transformer', 'GluMlp with LayerNorm: vision_transformer', 'ConvMlp: fastvit', 'MLPBlock: fasternet'])
@torch.no_grad()
def test_copies_pickles_and_checkpoints(family):
    model, x = build(family)
    linearize_ffns(model, [x])
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), y)
    other, _ = build(family, seed=1)
    linearize_ffns(other, [x + 1])
    assert not same_weights(model, other)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), y)
    assert all(p.is_leaf and p.is_contiguous() for p in model.parameters())


def test_converted_models_train():
    model, x = build('ConvMlp: fastvit')
    linearize_ffns(model, [x])
    model.train()(x).sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all()
        for m in model.modules() if isinstance(m, RePaMlpDeploy) for p in m.parameters())


@pytest.mark.slow
@pytest.mark.parametrize('family', ['Mlp: vision_transformer', 'SwiGLU with LayerNorm: eva', 'ConvMlp: fastvit'])
@torch.no_grad()
def test_compile_and_export(family):
    model, x = build(family)
    linearize_ffns(model, [x])
    x = x[:2]
    y = model(x)
    exported = torch.export.export(model, (x,))
    assert relative(exported.module()(x), y) < 1e-5
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    assert relative(compiled(x), y) < 1e-5


def test_check_convertible_and_public_function():
    model, x = vit(), images(16, 32)
    assert [ffn.name for ffn in check_convertible(model)[0]] == ['blocks.0.mlp', 'blocks.1.mlp']
    assert find_ffns(model)[0][0].class_name == 'Mlp'
    report = timm_rep.convert_to_repa(model, calibration=[x], macs=.7)
    assert report.macs[1] <= .7 * report.macs[0]


@pytest.mark.parametrize('family', [
    'RepVitMlp: repvit', *(pytest.param(family, marks=pytest.mark.slow) for family in (
        'nextvit', 'ConvMlp: fastvit', 'ConvMlp: efficientvit_msra', 'FFN: shvit', 'FFN: iformer', 'LevitMlp: levit'))])
@torch.no_grad()
def test_models_that_timm_folds(family):
    """timm's reparameterize_model() before and after the conversion."""
    model, x = build(family)
    folded = reparameterize_model(model)
    assert linearize_ffns(folded, [x]).ffns
    linearize_ffns(model, [x])
    assert relative(reparameterize_model(model)(x), model(x)) < 1e-5
    assert relative(folded(x), model(x)) < 1e-2  # rounding may change which channels are idle


def test_a_model_converted_in_inference_mode_trains():
    model, x = vit(), images(16, 32)
    with torch.inference_mode():
        timm_rep.convert_to_repa(model, calibration=[x])
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('gamma', [0., 1e-7])
def test_channels_that_the_layer_scale_almost_removes(gamma):
    """Their scale cannot be told from rounding, by which the correction must not be divided."""
    converted = {}
    for compensate in (False, True):
        model = vit(depth=3, init_values=1.)
        with torch.no_grad():
            for block in model.blocks:
                block.ls2.gamma.fill_(.5)
                block.ls2.gamma[:4] = gamma
        timm_rep.convert_to_repa(model, .5, calibration=[images(80, 32)], compensate=compensate)
        converted[compensate] = [block.mlp for block in model.blocks]
    for plain, corrected in zip(converted[False], converted[True]):
        weights = [torch.cat([mlp.fc_idle.weight, mlp.fc_out.weight], 1) for mlp in (plain, corrected)]
        assert weights[1][:4].abs().max() < 2 * weights[0][:4].abs().max()
    assert relative(weights[1][4:], weights[0][4:]) > 1e-4  # the other channels are corrected


def test_a_hidden_layernorm_without_bias():
    model = vit(scale_mlp_norm=True, norm_layer=partial(nn.LayerNorm, bias=False))
    expected = model(images(4, 32))
    timm_rep.convert_to_repa(model, 0., calibration=[images(40, 32)])
    assert model.blocks[0].mlp.act[1].bias is None
    assert relative(model(images(4, 32)), expected) < 1e-4


@pytest.mark.parametrize('kwargs', [dict(idle_ratio=1.), dict(idle_ratio=[1.]), dict(macs=.7204)])
@pytest.mark.parametrize('gated', [False, True])
@torch.no_grad()
def test_no_active_channels_before_a_hidden_layernorm(gated, kwargs):
    """An affine function of the input remains, the best one on the images."""
    name = 'eva02_tiny_patch14_224' if gated else 'vit_tiny_patch16_224'
    args = dict(img_size=28, swiglu_mlp=True, scale_mlp=True) if gated else dict(img_size=32, scale_mlp_norm=True)
    if gated and 'macs' in kwargs:
        kwargs = dict(macs=.6823)
    torch.manual_seed(0)
    model = timm.create_model(name, embed_dim=48, num_heads=3, depth=1, num_classes=5, **args).eval()
    block, x, inputs = model.blocks[0], images(64, args['img_size']), []
    block.mlp.norm.weight.uniform_(.5, 2)
    block.mlp.norm.bias.normal_()
    ffn = copy.deepcopy(block.mlp)
    hook = block.mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(x)
    hook.remove()
    report = timm_rep.convert_to_repa(model, calibration=[x], compensate=False, **kwargs)
    assert report.ffns[-1].active_features == 0
    u = inputs[0].flatten(0, -2)
    y, converted = ffn(u), block.mlp(u)
    ones = torch.cat([u, torch.ones(len(u), 1)], 1).double()
    best = ones @ torch.linalg.lstsq(ones, y.double()).solution
    assert relative(converted, y) < 1.02 * relative(best, y)


def test_frozen_norms_keep_their_mode():
    """Of kept layers inside of FFNs and their blocks."""
    model = timm.create_model('starnet_s1', num_classes=5, depths=[1, 1, 1, 1], base_dim=8).train()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
    timm_rep.convert_to_repa(model, .5, calibration=[images(100, 64)])
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    converted = [m for m in model.modules() if isinstance(m, RePaMlpDeploy)]
    assert len(converted) == 4
    assert all(m.training and m.fc_in.training for m in converted)


def test_called_in_inference_mode():
    """The new weights can be trained."""
    model = vit()
    with torch.inference_mode():
        linearize_ffns(model, [images(80, 32)], .5)
    model(images(4, 32)).sum().backward()
    assert all(p.grad is not None for p in model.blocks[0].mlp.parameters())


@pytest.mark.parametrize('kwargs', [dict(idle_ratio=.5), dict(macs=.8)])
def test_images_of_inference_mode(kwargs):
    models, x = [vit(), vit()], images(80, 32)
    with torch.inference_mode():
        timm_rep.convert_to_repa(models[0], calibration=[x.clone()], **kwargs)
    timm_rep.convert_to_repa(models[1], calibration=[x], **kwargs)
    assert same_weights(*models)


def test_calibration_with_another_default_dtype():
    """Of more rows than bfloat16 can count."""
    models, x = [vit(img_size=96), vit(img_size=96)], images(40, 96)
    with default_dtype(torch.bfloat16):
        timm_rep.convert_to_repa(models[0], .5, calibration=[x])
    timm_rep.convert_to_repa(models[1], .5, calibration=[x])
    assert same_weights(*models)


def test_images_that_require_gradients():
    x = images(80, 32)
    models = [vit(), vit()]
    for model, calibration in zip(models, (x, x.clone().requires_grad_())):
        timm_rep.convert_to_repa(model, .5, calibration=[calibration])
    assert same_weights(*models)
