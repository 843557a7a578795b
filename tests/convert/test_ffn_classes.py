"""register_ffn and register_block: classes that are not timm's."""
import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import LayerScale, Mlp
from timm.models.mlp_mixer import MlpMixer

import timm_rep
from tests.helpers import images, relative, wild_
from timm_rep.convert import ffn_classes, register_block, register_ffn
from timm_rep.convert.ffn import find_ffns
from timm_rep.convert.ffn_classes import find_blocks
from timm_rep.layers import RePaMlp


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Registrations of a test end with it."""
    for name in ('_FFNS', '_BLOCKS'):
        monkeypatch.setattr(ffn_classes, name, dict(getattr(ffn_classes, name)))


class UserFfn(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.nonlinearity, self.down = nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim, bias=False)
        self.hidden_drop, self.out_drop = nn.Dropout(.1), nn.Dropout(.2)

    def forward(self, x):
        return self.out_drop(self.down(self.hidden_drop(self.nonlinearity(self.up(x)))))


class UserGatedFfn(nn.Module):
    """The values come first, and there is a norm before."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.ln, self.both, self.act = nn.LayerNorm(dim), nn.Linear(dim, 2 * hidden), nn.GELU()
        self.out = nn.Linear(hidden, dim)
        self.gate_last = True

    def forward(self, x):
        values, gates = self.both(self.ln(x)).chunk(2, -1)
        return self.out(self.act(gates) * values)


class UserBlock(nn.Module):
    def __init__(self, dim, ffn):
        super().__init__()
        self.pre, self.ffn, self.scale = nn.LayerNorm(dim), ffn(dim, 3 * dim), LayerScale(dim, init_values=.5)

    def forward(self, x):
        return x + self.scale(self.ffn(self.pre(x)))


class UserModel(nn.Module):
    def __init__(self, ffn=UserFfn, depth=2, dim=12):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 8, 8)
        self.layers = nn.Sequential(*(UserBlock(dim, ffn) for _ in range(depth)))
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        return self.head(self.layers(self.embed(x).flatten(2).transpose(1, 2)).mean(1))


REGISTRATIONS = {
    UserFfn: dict(first='up', act='nonlinearity', last='down', drop='hidden_drop out_drop'),
    UserGatedFfn: dict(first='both', last='out', packed=True, before='ln'),
}


@torch.no_grad()
def build(ffn=UserFfn, register=True):
    if register:
        register_ffn(ffn, **REGISTRATIONS[ffn])
        register_block(UserBlock, norm='pre', mlp='ffn', ls='scale')
    torch.manual_seed(0)
    model = UserModel(ffn).eval()
    for p in model.parameters():
        p.add_(.3 * torch.rand_like(p))
    return model, images(64, 32)


def test_nothing_is_found_before_the_registration():
    model, x = build(register=False)
    assert find_ffns(model) == ([], {})
    with pytest.raises(ValueError, match='pointwise FFN, but UserModel has none'):
        timm_rep.convert_to_repa(model, calibration=[x])


@pytest.mark.parametrize('ffn', REGISTRATIONS)
@torch.no_grad()
def test_from_data(ffn):
    model, x = build(ffn)
    before = model(x)
    exact = copy.deepcopy(model)
    timm_rep.convert_to_repa(exact, 0., calibration=[x])
    assert relative(exact(x), before) < 1e-5
    report = timm_rep.convert_to_repa(model, .5, calibration=[x])
    assert [ffn.name for ffn in report.ffns] == ['layers.0.ffn', 'layers.1.ffn']
    assert report.macs[1] < report.macs[0]
    assert 1e-6 < relative(model(x), before) < .5


def train(model, x, steps):
    optimizer = torch.optim.SGD(model.train().parameters(), lr=.05)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(len(x)) % 5).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize('ffn,norm', [(UserFfn, 'keep'), (UserFfn, 'batch'), (UserGatedFfn, 'keep')])
def test_annealed(ffn, norm):
    model, x = build(ffn)
    before = model(x)
    timm_rep.convert_to_repa(model, .5, anneal_steps=3, norm=norm)
    assert relative(model(x), before) < 1e-6
    expected = train(model, x, 3)(x)
    assert relative(model.reparameterize()(x), expected) < 1e-5


@torch.no_grad()
def test_to_train():
    model, x = build()
    old = copy.deepcopy(model)
    timm_rep.convert_to_repa(model, .5)
    mlps = [m for m in model.modules() if isinstance(m, RePaMlp)]
    assert len(mlps) == 2
    for mlp, block in zip(mlps, old.layers):
        assert (mlp.drop1.p, mlp.drop2.p) == (.1, .2)
        assert mlp.act.active_channels == 18
        assert isinstance(mlp.act.act, nn.SiLU)
        assert torch.equal(mlp.norm1.weight, block.pre.weight)
        assert torch.equal(mlp.ls.gamma, block.scale.gamma)
        wild_(mlp, 1, log_var=(-1, 1))
    expected = model(x)
    assert relative(model.reparameterize()(x), expected) < 1e-5


def test_gated_ffns_and_unknown_blocks_are_not_to_train():
    model, _ = build(UserGatedFfn)
    with pytest.raises(ValueError, match=r'layers\.0\.ffn is a UserGatedFfn'):
        timm_rep.convert_to_repa(model)
    register_ffn(UserFfn, **REGISTRATIONS[UserFfn])
    del ffn_classes._BLOCKS[f'{__name__}.UserBlock']
    with pytest.raises(ValueError, match=r'layers\.0\.ffn .*register_block'):
        timm_rep.convert_to_repa(UserModel())


def test_a_block_with_an_unknown_ffn_is_named():
    model, _ = build()
    model.layers[1].ffn = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
    before = repr(model)
    with pytest.raises(ValueError, match=r'layers\.1\.ffn is a Sequential'):
        timm_rep.convert_to_repa(model)
    assert repr(model) == before


def test_subclasses():
    """A subclass that inherits forward() is known; one with its own forward() is reported and has to be registered."""
    class Same(UserFfn):
        pass

    class Other(UserFfn):
        def forward(self, x):
            return super().forward(x)

    register_ffn(UserFfn, **REGISTRATIONS[UserFfn])
    ffns, others = find_ffns(nn.ModuleList([Same(4, 8), Other(4, 8)]))
    assert [ffn.name for ffn in ffns] == ['0']
    assert list(others) == ['1']
    assert 'register_ffn' in others['1']
    register_ffn(Other, **REGISTRATIONS[UserFfn])
    assert len(find_ffns(nn.ModuleList([Other(4, 8)]))[0]) == 1
    with pytest.raises(ValueError, match='UserFfn'):
        register_ffn(Same)
    with pytest.raises(ValueError, match='UserBlock'):
        register_block(type('Block', (UserBlock,), {}))


def _extra(ffn):
    ffn.extra = nn.Linear(4, 4)


class Scaled(UserFfn):
    def forward(self, x):
        return 1.1 * super().forward(x)


class Shortcut(UserFfn):
    def forward(self, x):
        return x + super().forward(x)


class OnMaps(UserFfn):
    def forward(self, x):
        batch, height, width, channels = x.shape
        return super().forward(x.reshape(batch, height * width, channels)).reshape(x.shape)


class AssertsMaps(UserFfn):
    def forward(self, x):
        assert x.ndim == 4
        return super().forward(x)


class ShortcutOnMaps(AssertsMaps):
    def forward(self, x):
        return x + super().forward(x)


class Pair(UserFfn):
    def forward(self, x):
        return super().forward(x), None


class OnTokens(UserFfn):
    def forward(self, x):
        tokens, channels = x.shape
        return super().forward(x.view(tokens, channels))


@pytest.mark.parametrize('cls', [OnMaps, AssertsMaps, OnTokens])
def test_ffns_of_other_dimensions(cls):
    register_ffn(cls, **REGISTRATIONS[UserFfn])
    ffns, others = find_ffns(nn.ModuleList([cls(4, 8)]))
    assert ([ffn.name for ffn in ffns], others) == (['0'], {})


@pytest.mark.parametrize('cls', [Scaled, Shortcut, ShortcutOnMaps, Pair])
@pytest.mark.parametrize('training', [False, True])
def test_ffns_that_compute_something_else(cls, training):
    """The parts of these FFNs alone would be another function."""
    register_ffn(cls, **REGISTRATIONS[UserFfn])
    module = nn.ModuleList([cls(4, 8)]).train(training)
    ffns, others = find_ffns(module)
    assert (ffns, list(others)) == ([], ['0'])
    assert all(m.training == training for m in module.modules())


@pytest.mark.parametrize(
    'kwargs', [{}, dict(anneal_steps=2), dict(calibration=[images(64, 32)])], ids=['to train', 'annealed', 'from data'])
def test_ffns_that_take_more_than_their_tokens(kwargs):
    """As those whose blocks pass height and width: what takes their place would fail."""
    class Sized(UserFfn):
        def forward(self, x, height, width=1):
            return super().forward(x)

    class Block(UserBlock):
        def forward(self, x):
            return x + self.scale(self.ffn(self.pre(x), 4))

    register_ffn(Sized, **REGISTRATIONS[UserFfn])
    register_block(Block, norm='pre', mlp='ffn', ls='scale')
    model = UserModel(Sized, depth=0).eval()
    model.layers.append(Block(12, Sized))
    with pytest.raises(ValueError, match=r'layers\.0\.ffn .*more than its tokens'):
        timm_rep.convert_to_repa(model, **kwargs)
    model(images(2, 32))


def test_dropouts_of_a_model_to_train():
    """They are kept, or the conversion is refused: in eval mode no check would see that one is lost."""
    model, _ = build()
    register_ffn(UserFfn, **{**REGISTRATIONS[UserFfn], 'drop': 'hidden_drop'})  # one name, after the activation
    with pytest.raises(ValueError, match=r"layers\.0\.ffn .*drop='out_drop'"):
        timm_rep.convert_to_repa(model)
    for block in model.layers:
        block.ffn.out_drop.p = 0.
    timm_rep.convert_to_repa(model)
    assert [(block.ffn.drop1.p, type(block.ffn.drop2)) for block in model.layers] == [(.1, nn.Identity)] * 2


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('ffn', REGISTRATIONS)
def test_ffns_of_other_dtypes(ffn, dtype):
    register_ffn(ffn, **REGISTRATIONS[ffn])
    assert len(find_ffns(nn.ModuleList([ffn(16, 32).to(dtype)]))[0]) == 1
    with torch.device('meta'):
        assert len(find_ffns(nn.ModuleList([ffn(16, 32)]))[0]) == 1


@pytest.mark.parametrize('parts', [
    dict(last='dwn'), dict(norm='nrm'), dict(absent='x'), dict(attribute='x'), dict(first='nonlinearity'),
    dict(first=''), dict(act='nonlinearity nonlinearity'), dict(drop='x')], ids=str)
def test_registrations_of_parts_that_are_not_there(parts):
    register_ffn(UserFfn, **{**REGISTRATIONS[UserFfn], **parts})
    model = nn.Sequential(UserFfn(4, 8))
    ffns, others = find_ffns(model)
    assert not ffns
    assert set(others) == {'0'}
    with pytest.raises(ValueError, match=r'0 (does not have|has no|must have)'):
        timm_rep.convert_to_repa(model, calibration=[torch.randn(8, 2, 1, 4)])


@pytest.mark.parametrize('attribute', ['norm', 'mlp'])
def test_blocks_without_a_registered_attribute(attribute):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(4), Mlp(4, 8)

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    register_block(Other, **{**dict(norm='norm', mlp='mlp'), attribute: 'x'})
    with pytest.raises(ValueError, match=r"Other must have .* no 'x': .*register_block"):
        timm_rep.convert_to_repa(nn.Sequential(Other()))


@pytest.mark.parametrize('change,reason', [
    (_extra, r'extra\.weight'),
    (lambda ffn: delattr(ffn, 'nonlinearity'), 'registered parts'),
    (lambda ffn: setattr(ffn, 'up', nn.Conv1d(4, 8, 1)), 'Conv1d'),
    (lambda ffn: setattr(ffn, 'nonlinearity', nn.PReLU(8)), 'every channel'),
    (lambda ffn: ffn.register_forward_hook(lambda *args: None), 'hooks'),
])
def test_modules_that_are_not_what_was_registered(change, reason):
    register_ffn(UserFfn, **REGISTRATIONS[UserFfn])
    ffn = UserFfn(4, 8)
    change(ffn)
    ffns, others = find_ffns(nn.ModuleList([ffn]))
    assert not ffns
    assert set(others) == {'0'}
    with pytest.raises(ValueError, match=reason):
        timm_rep.convert_to_repa(nn.ModuleList([ffn]), calibration=[images(8, 32)])


@pytest.mark.parametrize('args,error,message', [
    (('UserFfn()', dict(first=1)), TypeError, 'first'),
    (('UserFfn()', dict(packed='yes')), TypeError, 'packed'),
    (('UserFfn()', dict(drop='a b c')), ValueError, 'drop'),
    ((3, {}), TypeError, 'cls'),
    ((dict, {}), TypeError, 'cls'),
    ((UserFfn(4, 8), {}), TypeError, 'cls'),
])
def test_wrong_registrations(args, error, message):
    with pytest.raises(error, match=message):
        register_ffn(args[0], **args[1])
    if message == 'cls':
        with pytest.raises(error, match=message):
            register_block(args[0])


@pytest.mark.parametrize('conv,known', [
    (dict(kernel_size=1), True), (dict(kernel_size=1, groups=2), False), (dict(kernel_size=3, padding=1), False),
    (dict(kernel_size=1, stride=2), False), (dict(kernel_size=1, padding=1), False),
    (dict(kernel_size=1, padding='same'), True)])
def test_convolutions(conv, known):
    """1 x 1 convolutions are linear layers unless they have groups."""
    for name in ('fc1', 'fc2'):
        mlp = Mlp(8, 8, use_conv=True)
        setattr(mlp, name, nn.Conv2d(8, 8, **conv))
        ffns, others = find_ffns(nn.ModuleList([mlp]))
        assert (len(ffns), len(others)) == ((1, 0) if known else (0, 1))


def test_roles_of_timms_mlps():
    """MLPs of heads and over tokens are left alone."""
    model = MlpMixer(img_size=32, embed_dim=16, num_blocks=1)
    assert [ffn.name for ffn in find_ffns(model)[0]] == ['blocks.0.mlp_channels']
    model = UserModel(Mlp)
    model.head = Mlp(12, 12, 5)
    assert [ffn.name for ffn in find_ffns(model)[0]] == ['layers.0.ffn', 'layers.1.ffn']
    assert not list(find_blocks(model))


def test_a_shared_ffn_is_not_to_train():
    model, x = build()
    model.layers[1].ffn = model.layers[0].ffn
    before = repr(model)
    with pytest.raises(ValueError, match=r'layers\.0\.ffn is shared'):
        timm_rep.convert_to_repa(model)
    with pytest.raises(ValueError, match=r'layers\.0\.ffn is shared'):
        timm_rep.convert_to_repa(model, anneal_steps=2, norm='batch')
    assert repr(model) == before
    with torch.no_grad():
        expected = model(x)
        timm_rep.convert_to_repa(model, 0., calibration=[x])
        assert model.layers[1].ffn is model.layers[0].ffn
        assert relative(model(x), expected) < 1e-5
