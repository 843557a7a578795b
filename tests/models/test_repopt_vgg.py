import copy
import math
import pickle
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, reparameterize_model

import timm_rep
from tests import helpers
from tests.helpers import images, randomize_, relative
from tests.models import contract
from tests.models.contract import RepOptContract
from tests.reference import grad_mult
from timm_rep.layers import csla_layers
from timm_rep.models import RepOptVgg
from timm_rep.optim import GradMult, RepAdamW, RepSGD, get_grad_mult, set_grad_mult
from timm_rep.scales import Scales

VARIANTS = {
    'repopt_vgg_a0': (2, 4, 14, 1), 'repopt_vgg_a1': (2, 4, 14, 1), 'repopt_vgg_b0': (4, 6, 16, 1),
    'repopt_vgg_b1': (4, 6, 16, 1), 'repopt_vgg_b2': (4, 6, 16, 1),
    'repopt_vgg_l1': (8, 14, 24, 1), 'repopt_vgg_l2': (8, 14, 24, 1), 'repopt_vgg_l2se': (8, 14, 24, 1),
}
TINY = helpers.TINY['repopt_vgg']
SE = dict(attn_layer='se', attn_kwargs=dict(rd_ratio=.25, rd_divisor=1))
STRUCTURES = ['target', 'search', 'csla']
tiny = partial(helpers.tiny, 'repopt_vgg_a0')


def random_scales(model):
    """Scales of both signs, none near zero."""
    g = torch.Generator().manual_seed(0)

    def scale(n):
        return (.3 + torch.rand(n, generator=g)) * (torch.randint(0, 2, (n,), generator=g) * 2. - 1)

    return Scales({
        name: {branch: scale(len(s)) for branch, s in branches.items()}
        for name, branches in Scales.ones(model).items()
    })


def trained(**kwargs):
    """A tiny model with the statistics, norms and scales of no initialization, in eval mode."""
    return randomize_(tiny(**kwargs))


def test_registered():
    assert set(timm.list_models(module='repopt_vgg')) == set(VARIANTS)


@pytest.mark.parametrize('name', VARIANTS)
def test_architecture(name):
    """Table 1, appendix B: one convolution a block, strides, identities, the scales' initial values."""
    model = timm.create_model(name, device='meta')
    assert tuple(len(stage) for stage in model.stages) == VARIANTS[name]
    assert [f['reduction'] for f in model.feature_info] == [2, 4, 8, 16, 32]
    search = timm.create_model(name, structure='search', device='meta')
    for stages, conv in ((model.stages, model.stem.conv[0]), (search.stages, search.stem.conv[0])):
        assert conv.csla.stride == (2, 2)
        for stage in stages:
            for index, block in enumerate(stage):
                csla = block.conv[0].csla
                assert csla.stride == ((1, 1) if index else (2, 2))
                assert ('identity' in [b.name for b in csla.branches]) == (index > 0)
                assert csla.initial_scale == (math.sqrt(2 / index) if index else 1)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convs) == 1 + sum(VARIANTS[name])
    assert all(c.bias is None for c in convs)


def test_dilation_for_stride_adds_no_identity():
    """Where output_stride takes the stride of a stage that keeps the width, the block stays what it was."""
    args = dict(widths=(8, 16, 16, 16))
    for structure in ('target', 'search'):
        model, dense = tiny(structure=structure, **args), tiny(structure=structure, output_stride=8, **args)
        assert model.state_dict().keys() == dense.state_dict().keys()
        for name, layer in csla_layers(dense).items():
            assert layer.csla.branches == csla_layers(model)[name].csla.branches
        assert dense.stages[3][0].conv[0].csla.stride == (1, 1)


def test_the_stem_is_initialized_like_any_block():
    """Layers other than CSLA layers are initialized as in timm: a fan-out normal distribution and zeros."""
    model = tiny(stem_width=64, **dict(SE, attn_kwargs=dict(rd_ratio=1., rd_divisor=1)))
    fc = model.stem.attn.fc1
    assert fc.bias.abs().max() == 0
    assert abs(fc.weight.std().item() - math.sqrt(2 / 64)) < .01
    deploy = tiny(stem_width=64, reparameterized=True).stem.conv
    assert deploy.bias.abs().max() == 0
    assert abs(deploy.weight.std().item() - math.sqrt(2 / (9 * 64))) < .005


def test_se_follows_the_activation():
    model = trained(**SE)
    block = model.stages[1][0]
    x = torch.randn(2, 8, 9, 9)
    conv, norm = block.conv
    y = F.relu(F.batch_norm(conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias))
    z = y.mean((2, 3), keepdim=True)
    z = torch.sigmoid(block.attn.fc2(F.relu(block.attn.fc1(z))))
    torch.testing.assert_close(block(x), y * z)
    assert block.attn.fc1.out_channels == 4
    assert isinstance(model.stem.attn, type(block.attn))


@torch.no_grad()
def test_search_structure_at_its_start():
    model = tiny(structure='search')
    for stage in model.stages:
        for index, block in enumerate(stage):
            assert block.conv[0].structure == 'search'
            assert all(s.requires_grad for s in block.conv[0].scales.values())
            for scale in block.conv[0].scales.values():
                assert torch.equal(scale, torch.full_like(scale, math.sqrt(2 / index) if index else 1.))
            if index:
                identity = block.conv[0].weights['identity']
                assert identity.requires_grad
                assert torch.equal(identity, torch.ones_like(identity))


@pytest.mark.parametrize('structure', ['search', 'csla'])
def test_branches_take_the_scales(structure):
    scales = random_scales(tiny())
    model = tiny(structure=structure, scales=scales)
    for name, layer in csla_layers(model).items():
        assert all(torch.equal(layer.scales[b], scales[name][b]) for b in layer.scales)
        assert all(s.requires_grad == (structure == 'search') for s in layer.scales.values())
    read = Scales.from_model(model)
    assert all(torch.equal(read[n][b], scales[n][b]) for n in scales for b in scales[n])
    assert 'identity' in read['stages.1.1.conv.0']


def test_target_has_the_multipliers_and_kernels_of_its_scales():
    plain = tiny()
    scales = random_scales(plain)
    model = tiny(scales=scales)
    for name, layer in csla_layers(model).items():
        branches = [(b.name, None if b.name == 'identity' else b.kernel_size) for b in layer.csla.branches]
        expected = grad_mult(layer.weight.shape, branches, scales[name], 2)
        torch.testing.assert_close(get_grad_mult(layer.weight).dense('squared', torch.float64), expected)
    # the kernel of an identity block: 1 on the diagonal, and each row as large as its scales
    layer = model.stages[1][1].conv[0]
    bound = 1 / math.sqrt(16 * 9)
    corner = layer.weight[:, :, 0, 0].abs() / scales['stages.1.1.conv.0']['conv3x3'].abs()[:, None]
    assert .8 * bound < corner.max() <= bound * 1.0001
    centre = layer.weight[:, :, 1, 1]
    limit = scales['stages.1.1.conv.0']['conv3x3'].abs() * bound + scales['stages.1.1.conv.0']['conv1x1'].abs() / 4
    assert ((centre.diagonal() - 1).abs() <= limit * 1.0001).all()
    assert (centre.diagonal() - 1).abs().max() > 0
    again = tiny(scales=scales, reinit=False).stages[1][1].conv[0]
    assert again.weight.abs().max() <= bound
    assert get_grad_mult(again.weight) is not None


def test_forms_of_scales(tmp_path):
    scales = random_scales(tiny())
    scales.save(tmp_path / 's.safetensors')
    name = 'stages.2.1.conv.0'

    def dense(form):
        return csla_layers(tiny(scales=form))[name].grad_mult.dense('squared')

    path = tmp_path / 's.safetensors'
    for form in ({n: dict(b) for n, b in scales.items()}, str(path), path):
        assert torch.equal(dense(form), dense(scales))
    assert torch.equal(dense('init'), dense('default'))
    torch.testing.assert_close(dense('init')[0, 1], torch.tensor([[2., 2., 2.], [2., 4., 2.], [2., 2., 2.]]))
    assert dense('ones')[0, :2, 1, 1].tolist() == [3., 2.]
    mean = scales[name]['conv3x3'].mean().square().item()
    torch.testing.assert_close(dense(scales.mean_over_channels())[:, :, 0, 0], torch.full((24, 24), mean))
    plain = tiny(scales=False)
    assert all(get_grad_mult(p) is None for p in plain.parameters())
    with pytest.raises(ValueError, match='GradMult'):
        create_optimizer_v2(plain, opt='repsgd', lr=.1)
    assert create_optimizer_v2(plain, opt='repsgd', lr=.1, strict=False)
    assert all(get_grad_mult(p) is None for p in RepOptVgg(**TINY, scales=None).parameters())


def test_refusals(tmp_path):
    for kwargs, match in [
        (dict(structure='train'), r"'target', 'search' or 'csla', got 'train'"),
        (dict(structure='csla', scales=False), "scales .*structure='csla'"),
        (dict(drop_path_rate=.1), 'drop_path_rate'),
        (dict(strides=(2, 2, 2, 2)), 'strides must'),
        (dict(strides=2), 'strides must .*got 2'),
        (dict(depths=(1, 2)), 'depths must'),
        (dict(depths=(1, 0, 2, 1)), r'depths must .*\(1, 0, 2, 1\)'),
        (dict(widths=(8, 16, 24)), 'widths must be four multiples of 8'),
        (dict(widths=(10, 20, 30, 44)), 'widths must be four multiples of 8'),
        (dict(stem_width=0), 'stem_width must'),
        (dict(output_stride=4), 'output_stride must'),
        (dict(strides=(2, 2, 2, 2, 4)), 'strides must'),
        (dict(strides=(1, 2, 2, 2, 2), output_stride=8), 'strides must .*output_stride'),
        (dict(scales=random_scales(tiny(widths=(8, 16, 24, 40)))), r'(?s)scales of RepOptVgg.*stages\.3\.0.*40'),
        (dict(scales=random_scales(tiny(depths=(1, 2, 3, 1)))), r'stages\.2\.2\.conv\.0: not a layer'),
        (dict(scales=random_scales(tiny(depths=(1, 1, 2, 1)))), r"stages\.1\.1\.conv\.0: .*'conv3x3'"),
    ]:
        with pytest.raises(ValueError, match=match):
            tiny(**kwargs)
    with pytest.raises(FileNotFoundError, match=r'owner/name.*nowhere.safetensors'):
        tiny(scales=str(tmp_path / 'nowhere.safetensors'))
    for kwargs, match in [
        (dict(stem_type='rep'), 'stem_type'),
        (dict(norm_layer='groupnorm'), 'norm_layer'),
        (dict(not_an_argument=1), 'not_an_argument'),
    ]:
        with pytest.raises(TypeError, match=match):
            tiny(**kwargs)


@pytest.mark.parametrize('kwargs', [
    dict(),
    dict(structure='search'),
    dict(structure='csla'),
    SE,
    dict(SE, structure='search', act_layer='silu'),
    dict(output_stride=8),
    dict(output_stride=16, structure='search'),
    dict(strides=(1, 1, 2, 1, 2), structure='csla'),
    dict(drop_block_rate=.3),
    dict(in_chans=1),
], ids=str)
def test_reparameterize_is_exact(kwargs):
    model = trained(**kwargs)
    contract.check_reparameterize(model, partial(tiny, **kwargs), images()[:, :kwargs.get('in_chans', 3)])
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert all(m.bias is not None and not list(m.children()) for m in model.modules() if isinstance(m, nn.Conv2d))
    built = tiny(reparameterized=True, **kwargs)
    assert repr(built).replace('drop_rate=0.0', '') == repr(model).replace('drop_rate=0.0', '')


@torch.no_grad()
def test_reparameterize_keeps_the_memory_format():
    model = trained().to(memory_format=torch.channels_last)
    expected = model(images())
    model.reparameterize()
    assert model.stages[1][1].conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert relative(model(images()), expected) < 1e-5


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name == 'repopt_vgg_a0' else pytest.mark.slow) for name in VARIANTS])
@torch.no_grad()
def test_reparameterize_full_size(name):
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(.1, .5)
            module.running_mean.normal_(std=.1)
            module.bias.normal_()
    images_ = images(1, 96)
    expected = model(images_)
    blocks = [model.stem, *(block for stage in model.stages for block in stage)]
    before, x = [], images_
    for block in blocks:
        before.append((x, block(x)))
        x = before[-1][1] / before[-1][1].std()
    model.reparameterize()
    for block, (x, y) in zip([model.stem, *(block for stage in model.stages for block in stage)], before):
        assert relative(block(x), y) < 1e-5
    if name != 'repopt_vgg_l2se':  # 48 gates that open and close make noise of any rounding error
        assert relative(model(images_), expected) < 1e-5


def test_a_failed_reparameterization_changes_nothing():
    for error, spoil in [
        (ValueError, lambda block: setattr(block.conv[1], 'running_mean', None)),
        (OverflowError, lambda block: block.half().conv[1].weight.data.fill_(6e4)),
        (ValueError, lambda block: block.conv.__setitem__(0, nn.Sequential(block.conv[0], nn.Dropout()))),
        (ValueError, lambda block: block.conv.register_forward_hook(lambda module, args, y: 2 * y)),
    ]:
        model = trained()
        spoil(model.stages[1][1])
        with pytest.raises(error, match=r'stages\.1\.1\.conv cannot be folded: .'):
            model.reparameterize()
        assert all(isinstance(block.conv, nn.Sequential) for stage in model.stages for block in stage)


@pytest.mark.parametrize('strict', [True, False])
def test_loading_another_structure(strict):
    models = {'deploy': tiny(reparameterized=True), **{s: tiny(structure=s) for s in STRUCTURES}}
    for model, other, match in [
        ('deploy', 'target', "deploy structure.*target structure.*structure='target'.*reparameterize"),
        ('deploy', 'search', "deploy structure.*search or csla structure.*structure='search'"),
        ('target', 'deploy', 'deploy structure.*reparameterized=True'),
        ('target', 'csla', "target structure.*search or csla structure.*Scales.from_model"),
        ('search', 'target', "target structure.*structure='target'"),
        ('csla', 'deploy', 'deploy structure.*reparameterized=True'),
    ]:
        before = copy.deepcopy(models[model].state_dict())
        with pytest.raises(RuntimeError, match=match):
            models[model].load_state_dict(models[other].state_dict(), strict=strict)
        assert all(torch.equal(v, before[k]) for k, v in models[model].state_dict().items())
    models['csla'].load_state_dict(models['search'].state_dict())  # the same branches


def test_config_leaves_scales_of_this_machine_out(tmp_path):
    """Loading the config does not lead to training with other multipliers unawares."""
    pytest.importorskip('timm.models._input', reason='timm records the arguments of a model since 1.0.31')
    from timm.models import save_for_hf

    path = tmp_path / 's.safetensors'
    random_scales(tiny()).save(path)
    for scales in (random_scales(tiny()), str(path)):
        save_for_hf(tiny(scales=scales, strides=(2, 2, 2, 2, 1)), tmp_path / 'hub')
        again = timm.create_model(f'local-dir:{tmp_path / "hub"}', pretrained=True)
        assert again.feature_info[-1]['reduction'] == 16
        with pytest.raises(ValueError, match='GradMult'):
            create_optimizer_v2(again, opt='repsgd', lr=.1)
    assert tiny(scales='ones')._model_args['scales'] == 'ones'
    # a later version may have searched scales where this one has none
    for default in (tiny(), tiny(scales='default'), copy.deepcopy(tiny())):
        assert default._model_args['scales'] == 'init'


class TestMultiplierFollowsTheWeight:
    """Whatever happens to the model, the optimizer finds the multipliers that it was created with."""

    @pytest.fixture
    def model(self):
        return tiny(scales=random_scales(tiny()))

    @staticmethod
    def check(model, like):
        layers, expected = csla_layers(model), csla_layers(like)
        assert layers.keys() == expected.keys() != set()
        params = set(model.parameters())
        for name, layer in layers.items():
            assert layer.weight in params
            found = get_grad_mult(layer.weight)
            assert torch.equal(found.dense('squared'), expected[name].grad_mult.dense('squared'))
        create_optimizer_v2(model, opt='repsgd', lr=.1)

    @pytest.mark.parametrize('change', [
        copy.deepcopy,
        copy.copy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.half(),
        lambda m: m.bfloat16().float(),
        lambda m: m.to(torch.float64),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.to('meta').to_empty(device='cpu'),
        lambda m: m.share_memory(),
        lambda m: nn.SyncBatchNorm.convert_sync_batchnorm(m),
        lambda m: timm.layers.convert_sync_batchnorm(m),
        lambda m: timm.utils.freeze(m, ['stem']) or m,
        lambda m: torch.compile(m),
        lambda m: m.load_state_dict(tiny(scales='ones').state_dict()) and m,
        lambda m: m.load_state_dict(tiny(scales='ones').state_dict(), assign=True) and m,
        lambda m: (m.to('meta').load_state_dict(tiny(scales='ones').state_dict(), assign=True) and m) or m,
        lambda m: ModelEmaV3(m).module,
        lambda m: m.set_grad_checkpointing(True) or m,
        lambda m: nn.Sequential(m)[0],
        lambda m: m.reset_classifier(3) or m,
    ], ids=range(20))
    def test_through(self, model, change):
        like = copy.deepcopy(model)
        self.check(change(model), like)

    def test_a_saved_model(self, model, tmp_path):
        torch.save(model, tmp_path / 'model.pt')
        self.check(torch.load(tmp_path / 'model.pt', weights_only=False), model)

    def test_state_dicts_hold_tensors_only(self, model, tmp_path):
        torch.save(model.state_dict(), tmp_path / 'state.pt')
        torch.load(tmp_path / 'state.pt', weights_only=True)
        assert not any('scale' in k or 'grad' in k for k in model.state_dict())

    def test_overwritten_parameters(self, model):
        like = copy.deepcopy(model)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            self.check(model.double(), like)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)

    def test_swapped_parameters(self, model):
        like = copy.deepcopy(model)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            self.check(model.double(), like)
            model.load_state_dict(like.double().state_dict())
            self.check(model, like)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def test_one_set_by_hand_stays(self, model):
        conv = model.stages[1][1].conv[0]
        set_grad_mult(conv.weight, None)
        assert copy.deepcopy(model.half()).stages[1][1].conv[0].grad_mult is None
        mult = GradMult(conv.csla, Scales.ones(model)['stages.1.1.conv.0'])
        set_grad_mult(conv.weight, mult)
        found = copy.deepcopy(model.float()).stages[1][1].conv[0].grad_mult
        assert torch.equal(found.dense('squared'), mult.dense('squared'))

    def test_without_a_weight(self, model):
        conv = model.stages[1][1].conv[0]
        conv.weight = None
        assert conv.grad_mult is None
        model.half()

    def test_copies_are_independent(self, model):
        other = copy.deepcopy(model)
        timm_rep.attach_grad_mults(other, 'ones')
        name = 'stages.1.1.conv.0'
        assert not torch.equal(
            csla_layers(other)[name].grad_mult.dense('squared'), csla_layers(model)[name].grad_mult.dense('squared'))

    def test_features_only(self):
        net = timm.create_model('repopt_vgg_a0', features_only=True, **TINY)
        create_optimizer_v2(net, opt='repsgd', lr=.1)
        assert sum(get_grad_mult(p) is not None for p in net.parameters()) == 7


def train(model, optimizer, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    outputs = []
    for _ in range(steps):
        x = torch.randn(8, 3, 64, 64, generator=g, dtype=torch.float64)
        y = torch.randint(0, 5, (8,), generator=g)
        output = model(x)
        outputs.append(output.detach())
        optimizer.zero_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()
    return torch.stack(outputs)


def csla_and_target(**kwargs):
    """The two structures in float64 with the same scales, negative ones among them, and the same function."""
    scales = random_scales(tiny())
    csla = tiny(structure='csla', scales=scales, dtype=torch.float64, **kwargs)
    target = tiny(scales=scales, dtype=torch.float64, **kwargs)
    with torch.no_grad():
        ours = csla_layers(target)
        for name, block in csla_layers(csla).items():
            ours[name].weight.copy_(block.equivalent_kernel())
        rest = {k: v for k, v in csla.state_dict().items() if '.conv.0.' not in k}
        assert not target.load_state_dict(rest, strict=False).unexpected_keys
    return csla, target


@pytest.mark.parametrize('kwargs', [dict(), pytest.param(SE, marks=pytest.mark.slow)], ids=['plain', 'se'])
@pytest.mark.parametrize('rep,plain,args,tolerance', [
    (RepSGD, torch.optim.SGD, dict(lr=.01), 1e-10),
    (RepSGD, torch.optim.SGD, dict(lr=.02, momentum=.9, weight_decay=1e-3, nesterov=True), 1e-10),
    (RepAdamW, torch.optim.AdamW, dict(lr=1e-3, weight_decay=.05, eps=1e-16), 1e-6),
], ids=['sgd', 'nesterov', 'adamw'])
def test_csla_is_gr_end_to_end(kwargs, rep, plain, args, tolerance):
    """The proposition, on a RepOpt-VGG of six blocks and a stem."""
    csla, target = csla_and_target(**kwargs)
    steps = 20
    a = train(csla, plain([p for p in csla.parameters() if p.requires_grad], **args), steps)
    b = train(target, rep(target.parameters(), **args), steps)
    # rounding grows from step to step through the ReLUs and the normalization: what counts is the kernels' agreement
    assert relative(b[:10], a[:10]) < tolerance
    assert relative(b, a) < tolerance
    ours = csla_layers(target)
    for name, block in csla_layers(csla).items():
        assert relative(ours[name].weight, block.equivalent_kernel()) < tolerance


@pytest.mark.parametrize('excluded', [True, False])
def test_weight_decay_by_timms_factory(excluded):
    """The factory excludes vectors, and so the identity branches, unless it is told not to."""
    outputs = [
        train(model, create_optimizer_v2(
            model, opt=opt, lr=.02, momentum=.9, weight_decay=1e-2, filter_bias_and_bn=excluded), 5)
        for model, opt in zip(csla_and_target(), ('sgd', 'repsgd'))]
    assert (relative(*outputs) < 1e-10) != excluded


@pytest.mark.parametrize('rule', ['sgd', 'adamw'])
def test_recorded_training(recorded, rule):
    """Six steps of the released optimizers.

    The recorded ``start`` was saved after the steps (it equals ``end``). The weights before them were drawn from
    seed 0: first the 3 x 3 kernels and the classifier, then from the same seed the 1 x 1 kernels; the recorded first
    loss confirms it.
    """
    tensors, config = recorded(f'repopt_vgg_train_{rule}')
    model = released_size(scales=False)
    layers = csla_layers(model)
    scales = {}
    for i, name in enumerate(layers):
        found = [tensors[f'scales.{i}.{j}'] for j in range(3) if f'scales.{i}.{j}' in tensors]
        scales[name] = dict(zip(('identity', 'conv1x1', 'conv3x3')[-len(found):], found))
    timm_rep.attach_grad_mults(model, scales)
    for name, layer in layers.items():
        recorded_name = 'stage0' if name == 'stem.conv.0' else 'stage{}.{}'.format(
            int(name.split('.')[1]) + 1, name.split('.')[2])
        dense = layer.grad_mult.dense('squared' if rule == 'sgd' else 'absolute')
        torch.testing.assert_close(dense, tensors[f'grad_mult.{recorded_name}.conv.weight'])

    torch.manual_seed(0)
    wide = {n: nn.Conv2d(c.in_channels, c.out_channels, 3, bias=False).weight for n, c in layers.items()}
    model.head.fc.load_state_dict(nn.Linear(64, 10).state_dict())
    torch.manual_seed(0)
    with torch.no_grad():
        for name, layer in layers.items():
            narrow = nn.Conv2d(layer.in_channels, layer.out_channels, 1).weight
            weights = {'conv3x3': wide[name], 'conv1x1': narrow, 'identity': scales[name].get('identity')}
            layer.weight.copy_(layer.csla.kernel(weights, scales[name]))

    args = dict(config['optimizer'])
    nesterov = args.pop('nesterov', None)
    optimizer = create_optimizer_v2(model.parameters(), opt=f'rep{rule}', **args)
    assert optimizer.defaults.get('nesterov') == nesterov
    model.train()
    for x, y, loss in zip(tensors['inputs'], tensors['targets'], tensors['losses']):
        ours = F.cross_entropy(model(x), y)
        assert abs(ours.item() - loss.item()) < 1e-5
        optimizer.zero_grad()
        ours.backward()
        optimizer.step()
    end = released_size()
    timm_rep.load_released(end, {k.removeprefix('end.'): v for k, v in tensors.items() if k.startswith('end.')})
    for key, value in end.state_dict().items():
        ours, value = model.state_dict()[key].double(), value.double()
        # as a whole: under AdamW an entry whose gradient is next to nothing moves by the sign of a rounding error
        assert (ours - value).norm() <= 1e-5 * value.norm() + 1e-7
        if rule == 'sgd':
            torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-5)


def released_size(**kwargs):
    return timm.create_model(
        'repopt_vgg_a0', depths=(1, 2, 2, 1), widths=(16, 16, 32, 64), stem_width=16, num_classes=10, **kwargs)


@pytest.mark.parametrize('name,kwargs', [
    ('repopt_vgg_hs', dict(structure='search')), ('repopt_vgg_se_target', SE)])
@torch.no_grad()
def test_recorded_outputs(recorded, name, kwargs):
    tensors, _ = recorded(name)
    model = released_size(**kwargs)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    assert timm_rep.load_released(model, weights) is model
    model.eval()
    assert relative(model(tensors['input']), tensors['output']) < 1e-5
    assert relative(model.reparameterize()(tensors['input']), tensors['output']) < 1e-5
    with pytest.raises(RuntimeError, match=r'(?s)fits RepOptVgg.*missing: stage0'):
        timm_rep.load_released(released_size(structure='csla' if name.endswith('target') else 'target', **SE), weights)


class TestContract(RepOptContract):
    """The interface of any timm conv net, in every structure."""
    tiny, trained_form = map(staticmethod, (tiny, trained))
    block = 'stages.1.1'
    layers = 1 + 6 + 1
    taps = ((2, 8, 32, 32), (2, 8, 16, 16), (2, 16, 8, 8), (2, 24, 4, 4), (2, 32, 2, 2))
    arguments = (
        (dict(num_classes=0), (2, 32)),
        (dict(num_classes=0, global_pool=''), (2, 32, 2, 2)),
        (dict(global_pool='max'), (2, 5)),
        (dict(in_chans=1), (2, 5)),
        (dict(drop_rate=.1, drop_block_rate=.1), (2, 5)),
        (SE, (2, 5)),
        (dict(act_layer='silu'), (2, 5)),
    )

    @classmethod
    def changed_form(cls):
        return trained(scales=random_scales(tiny()), **SE)

    @torch.no_grad()
    def test_feature_shapes(self, model):
        assert model.forward_features(images()).shape == (2, 32, 2, 2)

    @torch.no_grad()
    def test_forward_intermediates(self, model):
        super().test_forward_intermediates(model)
        x = images()
        _, taps = model.forward_intermediates(x)
        early = model.forward_intermediates(x, [1], stop_early=True, intermediates_only=True)
        assert torch.equal(early[0], taps[1])
        model.prune_intermediate_layers([2])
        assert len(model.stages) == 2
        assert torch.equal(model.forward_intermediates(x, [2], intermediates_only=True)[0], taps[2])

    @pytest.mark.parametrize('output_stride', [8, 16, 32])
    @torch.no_grad()
    def test_features_only(self, kind, output_stride):
        net = self.build(kind, features_only=True, output_stride=output_stride).eval()
        assert net.feature_info.channels() == [8, 8, 16, 24, 32]
        reductions = [min(r, output_stride) for r in (2, 4, 8, 16, 32)]
        assert net.feature_info.reduction() == reductions
        features = net(images())
        assert [tuple(f.shape[2:]) for f in features] == [(64 // r, 64 // r) for r in reductions]
        for a, b in zip(reparameterize_model(net)(images()), features):
            assert relative(a, b) < 1e-5

    @torch.no_grad()
    def test_output_stride_is_the_same_net(self, kind, model):
        """Dilation for stride: at every other position of the denser map, the very same features."""
        dense = self.build(kind, output_stride=16).eval()
        dense.load_state_dict(model.state_dict())
        y = dense.forward_features(images())
        assert y.shape == (2, 32, 4, 4)
        torch.testing.assert_close(y[:, :, ::2, ::2], model.forward_features(images()), rtol=1e-4, atol=1e-4)

    def test_strides_and_features(self, kind):
        for strides, reductions in (((1, 2, 1, 2, 2), [1, 2, 4, 8]), ((2, 1, 1, 1, 1), [2])):
            net = self.build(kind, features_only=True, strides=strides).eval()
            assert net.feature_info.reduction() == reductions
            assert [64 // f.shape[2] for f in net(images())] == reductions

    def test_strides(self, kind):
        for strides in ((1, 2, 2, 2, 2), (2, 1, 2, 1, 2), (1, 1, 1, 1, 1)):
            model = self.build(kind, strides=strides).eval()
            reduction = math.prod(strides)
            assert model.feature_info[-1]['reduction'] == reduction
            assert model.forward_features(images()).shape[2:] == (64 // reduction,) * 2

    @pytest.mark.parametrize('size', [(32, 32), (97, 65), (224, 160)])
    def test_image_sizes(self, model, size):
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)


def test_names_of_the_config():
    contract.check_cfg_names(list(VARIANTS))


@pytest.mark.parametrize('opt', ['repsgd', 'repadamw'])
def test_training_lowers_the_loss(opt):
    model = tiny(widths=(16, 16, 24, 32)).train()
    optimizer = create_optimizer_v2(model, opt=opt, lr=.02 if opt == 'repsgd' else 3e-3, weight_decay=4e-5)
    x, target = images(20), torch.arange(20) % 5
    losses = contract.train(model, optimizer, x, target, steps=20)
    assert losses[-1] < 0.5 * losses[0]


def test_saved_scales_are_the_attached_ones(tmp_path):
    """A model that is loaded has the attached multipliers, or none, which RepSGD refuses; never the original ones."""
    pytest.importorskip('timm.models._input', reason='timm records the arguments of a model since 1.0.31')
    for scales, same in (('ones', True), (random_scales(tiny()), False), (False, False)):
        model = tiny()
        timm_rep.attach_grad_mults(model, scales)
        timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
        again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
        if same:
            for a, b in zip(csla_layers(model).values(), csla_layers(again).values()):
                assert torch.equal(a.grad_mult.dense('squared'), b.grad_mult.dense('squared'))
        else:
            with pytest.raises(ValueError, match='GradMult'):
                RepSGD(again.parameters(), lr=.1)
    search = randomize_(tiny(structure='search', scales=random_scales(tiny())))
    timm.models.save_for_hf(search, tmp_path, safe_serialization=True)
    again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    assert Scales.from_model(again) == Scales.from_model(search)


@pytest.mark.parametrize('folded', [False, True])
@torch.no_grad()
def test_weights_for_gray_images(tmp_path, folded):
    """The first convolution has another name in a folded model; its kernel is summed over the colours."""
    pytest.importorskip('timm.models._input', reason='timm records the arguments of a model since 1.0.31')
    model = trained()
    if folded:
        model.reparameterize()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    gray = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, in_chans=1).eval()
    x = images()[:, :1]
    assert relative(gray(x), model(x.expand(-1, 3, -1, -1))) < 1e-5


@torch.no_grad()
def test_a_file_of_weights_for_gray_images(tmp_path):
    model = trained()
    torch.save(model.state_dict(), tmp_path / 'training.pth')
    torch.save(model.reparameterize().state_dict(), tmp_path / 'folded.pth')

    def load(name, **kwargs):
        return tiny(
            reparameterized=True, pretrained=True, **kwargs,
            pretrained_cfg_overlay=dict(file=str(tmp_path / name), num_classes=model.num_classes)).eval()

    x = images()[:, :1]
    assert relative(load('folded.pth', in_chans=1)(x), model(x.expand(-1, 3, -1, -1))) < 1e-5
    with pytest.raises(RuntimeError, match=r'deploy structure, but it has the target structure'):
        load('training.pth')
