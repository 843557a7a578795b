"""The interface of any timm model, in every structure: tests that the tests of each family inherit."""
import copy
import io
import pickle
from types import MappingProxyType

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load, save
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model
from torch.nn.modules.batchnorm import _BatchNorm

from tests.helpers import images, needs_recorded_args, relative
from timm_rep.layers import CslaBlock, CslaConv2d, RePaMlp, csla_layers, foldable_layers
from timm_rep.optim import get_grad_mult


def train(model, optimizer, x, target, steps):
    """Train on one batch; returns the losses."""
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def check_reparameterize(model, build, x):
    """Folding is exact, in place, the same as by timm's utility, and the same when done twice; its checkpoint loads.

    model: one with weights of no initialization, in eval mode. build: makes one of its kind.
    """
    expected = model(x)
    utility = reparameterize_model(model)
    assert utility.reparameterized
    assert not model.reparameterized  # the utility works on a copy
    assert model.train().reparameterize() is model
    assert model.eval().reparameterized
    assert not any(isinstance(m, (RePaMlp, CslaBlock, CslaConv2d)) for m in model.modules())
    assert relative(model(x), expected) < 1e-5
    assert torch.equal(utility(x), model(x))
    once = copy.deepcopy(model.state_dict())
    model.reparameterize()
    assert all(torch.equal(v, once[k]) for k, v in model.state_dict().items())
    built = build(reparameterized=True).eval()
    built.load_state_dict(once)
    assert torch.equal(built(x), model(x))


def check_compile(model, x):
    """A model compiles to one graph without breaks, forward and backward."""
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    compiled(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def check_export(model, build_images):
    """torch.export with a dynamic batch size. build_images: number of images -> batch."""
    batch = torch.export.Dim('batch', min=2, max=64)
    program = torch.export.export(model, (build_images(3),), dynamic_shapes=({0: batch},))
    assert torch.allclose(program.module()(build_images(5)), model(build_images(5)), atol=1e-5)


def check_cfg_names(names):
    """The first model has the modules that its cfg names, and the cfgs of the others name the same."""
    model = timm.create_model(names[0], device='meta')
    cfg = model.default_cfg
    classifiers = cfg['classifier'] if isinstance(cfg['classifier'], tuple) else (cfg['classifier'],)
    found = model.get_classifier()
    assert isinstance(model.get_submodule(cfg['first_conv']), nn.Conv2d)
    assert tuple(map(model.get_submodule, classifiers)) == (found if isinstance(found, tuple) else (found,))
    for other in map(timm.get_pretrained_cfg, names[1:]):
        assert (other.first_conv, other.classifier) == (cfg['first_conv'], cfg['classifier'])


class Contract:
    """A subclass says how to build a tiny model of each ``kind``, for images of ``size``, and what it returns."""
    kinds = ()
    size = 64
    taps = ()  # shapes of the features of forward_intermediates(), (2, channels, height, width)
    feature_args = MappingProxyType({})  # arguments for features_only
    features = ()  # (channels, reduction of the size, shape) of each feature
    arguments = ()  # (arguments of the model, shape of its outputs)
    block = None  # name of one that is checkpointed
    layers = None  # groups of parameters from input to output, for layer decay
    scriptable = ()  # the kinds that torch.jit.script takes; tracing takes all
    timms = None  # a model of timm's that FX has to trace for it to trace this one

    @staticmethod
    def build(kind, **kwargs):
        """A fresh model, the same one every time."""
        raise NotImplementedError

    @staticmethod
    def trained(kind):
        """A model with the weights of no initialization, in eval mode."""
        raise NotImplementedError

    @classmethod
    def pytest_generate_tests(cls, metafunc):
        if 'kind' in metafunc.fixturenames:
            metafunc.parametrize('kind', cls.kinds)
        if 'kwargs' in metafunc.fixturenames:
            metafunc.parametrize('kwargs,shape', cls.arguments, ids=str)

    @pytest.fixture
    def model(self, kind):
        return self.trained(kind)

    def images(self, n=2, **kwargs):
        return images(n, self.size, **kwargs)

    @torch.no_grad()
    def test_features_and_head(self, model):
        x = self.images()
        features = model.forward_features(x)
        assert torch.equal(model.forward_head(features), model(x))
        assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)

    @torch.no_grad()
    def test_forward_intermediates(self, model):
        final, taps = model.forward_intermediates(self.images())
        assert torch.equal(final, model.forward_features(self.images()))
        assert [tuple(t.shape) for t in taps] == [*self.taps]

    @torch.no_grad()
    def test_features_only(self, kind):
        net = self.build(kind, features_only=True, **self.feature_args).eval()
        features = net(self.images())
        shapes = [tuple(f.shape) for f in features]
        assert [*zip(net.feature_info.channels(), net.feature_info.reduction(), shapes)] == [*self.features]
        for a, b in zip(reparameterize_model(net)(self.images()), features):
            assert relative(a, b) < 1e-5

    @torch.no_grad()
    def test_features_only_by_tracing(self, kind):
        """A traced model has the layers that fold, and a copy of it their multipliers."""
        try:
            net = self.build(kind, features_only=True, feature_cls='fx', **self.feature_args).eval()
        except TypeError as e:
            if 'is_causal' not in str(e):
                raise
            pytest.skip(f"FX cannot trace the attention of this timm: {e}")
        copied = copy.deepcopy(net).eval()  # otherwise it would run the graph of training
        multiplied = [[get_grad_mult(p) is not None for p in each.parameters()] for each in (net, copied)]
        assert multiplied[0] == multiplied[1]
        assert any(multiplied[0]) == (kind == 'target')
        assert [*csla_layers(net)] == [*csla_layers(copied)]
        layers = [layer.structure for _, layer in foldable_layers(net)]
        assert bool(layers) == (kind not in ('deploy', 'vanilla'))
        features = net(self.images())
        folded = reparameterize_model(net).eval()
        assert [layer.structure for _, layer in foldable_layers(folded)] == ['deploy'] * len(layers)
        for a, b in zip(folded(self.images()), features, strict=True):
            assert relative(a, b) < 1e-5

    def test_arguments(self, kind, kwargs, shape):
        model = self.build(kind, **kwargs)
        y = model(self.images()[:, :kwargs.get('in_chans', 3)])
        assert y.shape == shape
        y.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    def test_classifier(self, model):
        model.reset_classifier(7)
        assert model(self.images()).shape == (2, 7)
        model.reset_classifier(0, 'avg')
        assert model(self.images()).shape == (2, model.head_hidden_size)

    def test_parameter_groups(self, model):
        groups = group_parameters(model, model.group_matcher(), reverse=True)
        assert groups.keys() == {n for n, _ in model.named_parameters()}
        assert len(set(groups.values())) == self.layers
        optimizer = create_optimizer_v2(model, opt='sgd', lr=.1, weight_decay=.1, layer_decay=.8)
        assert sum(len(g['params']) for g in optimizer.param_groups) == sum(
            p.requires_grad for p in model.parameters())

    def test_grad_checkpointing(self, model):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.
        model.drop_rate = 0.
        grads, calls = [], []
        model.get_submodule(self.block).register_forward_pre_hook(lambda *args: calls.append(1))
        for enable in (False, True):
            model.zero_grad()
            model.set_grad_checkpointing(enable)
            model(self.images(4)).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        assert len(calls) == 1 + 2  # once more for the backward pass
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())

    @pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
    def test_dtype(self, kind, dtype):
        built = self.build(kind, dtype=dtype).eval()
        assert all(p.dtype == dtype for p in built.parameters())
        assert built(self.images(dtype=dtype)).dtype == dtype

    def test_meta(self, kind, model):
        meta = self.build(kind, device='meta')
        assert all(t.is_meta for t in meta.state_dict().values())
        meta.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(meta.eval()(self.images()), model(self.images()))
        empty = self.build(kind, device='meta').reparameterize()
        assert empty(torch.empty(2, 3, self.size, self.size, device='meta')).shape == (2, 5)

    def test_copy_and_pickle(self, model):
        x = self.images()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), model(x))
            assert other.pretrained_cfg == model.pretrained_cfg

    def test_state_dict_round_trip(self, kind, model):
        other = self.build(kind).eval()
        other.load_state_dict(load(save({k: v.contiguous() for k, v in model.state_dict().items()})))
        assert torch.equal(other(self.images()), model(self.images()))
        # keys as DataParallel and DDP write them
        prefixed = {f'module.{k}': v for k, v in model.state_dict().items()}
        other = self.build(kind).eval()
        other.load_state_dict(timm.models.clean_state_dict(prefixed))
        assert torch.equal(other(self.images()), model(self.images()))

    @needs_recorded_args
    @pytest.mark.parametrize('folded_by', ['method', 'utility'])
    def test_config_of_a_folded_model_rebuilds_it(self, tmp_path, folded_by):
        """timm's own export records how to build the model, the deploy structure included."""
        model = self.changed_form()
        model = model.reparameterize() if folded_by == 'method' else reparameterize_model(model)
        timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
        again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
        assert again.reparameterized
        assert torch.equal(again(self.images()), model(self.images()))

    @pytest.mark.slow
    def test_fx(self, model):
        feature_extraction = pytest.importorskip('torchvision.models.feature_extraction')
        if self.timms:
            try:
                feature_extraction.get_graph_node_names(timm.create_model(self.timms))
            except TypeError as e:
                pytest.skip(f"FX cannot trace this timm's own {self.timms}: {e}")
        _, names = feature_extraction.get_graph_node_names(model)
        net = feature_extraction.create_feature_extractor(model, [names[-1]])
        assert torch.allclose(net(self.images())[names[-1]], model(self.images()), atol=1e-6)

    @pytest.mark.slow
    @pytest.mark.filterwarnings('ignore:.*is deprecated. Please switch to:FutureWarning')
    @pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
    def test_torchscript(self, kind, model):
        traced = torch.jit.trace(model, self.images())
        assert torch.allclose(traced(self.images()), model(self.images()), atol=1e-6)
        if kind not in self.scriptable:
            return
        with timm.layers.set_scriptable(True):
            scriptable = self.build(kind, scriptable=True).eval()
        scriptable.load_state_dict(model.state_dict())
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(scriptable), buffer)
        buffer.seek(0)
        assert torch.allclose(torch.jit.load(buffer)(self.images()), model(self.images()), atol=1e-6)

    @pytest.mark.slow
    def test_export(self, model):
        check_export(model, self.images)

    @pytest.mark.slow
    def test_compile(self, model):
        check_compile(model, self.images())


class RePaContract(Contract):
    """A subclass has the functions ``tiny`` and ``trained_form``, which build the model in the training structure."""
    kinds = scriptable = ('training', 'deploy')
    variants = ()  # names of the models of the family, which have one layout
    learning_rate = 3e-3
    training = MappingProxyType({})  # arguments of the model that is trained

    @classmethod
    def build(cls, kind, **kwargs):
        return cls.tiny(reparameterized=kind == 'deploy', **kwargs)

    @classmethod
    def trained(cls, kind):
        return cls.trained_form().reparameterize() if kind == 'deploy' else cls.trained_form()

    @classmethod
    def changed_form(cls):
        """With arguments other than the defaults."""
        return cls.trained_form(idle_ratio=.6)

    def test_names_of_the_config(self):
        check_cfg_names(self.variants)

    def test_batch_norms(self):
        """bn_momentum and bn_eps reach every BatchNorm of an FFN."""
        ffns = [m for m in self.tiny(bn_momentum=.05, bn_eps=1e-3).modules() if isinstance(m, RePaMlp)]
        norms = [m for ffn in ffns for m in ffn.modules() if isinstance(m, _BatchNorm)]
        assert len(norms) == 2 * len(ffns) > 0
        assert all((norm.momentum, norm.eps) == (.05, 1e-3) for norm in norms)

    def test_the_other_structure_is_refused(self):
        with pytest.raises(RuntimeError, match='deploy structure'):
            self.tiny().load_state_dict(self.tiny(reparameterized=True).state_dict(), strict=False)

    def test_training_moves_the_statistics_and_lowers_the_loss(self):
        model = self.tiny(drop_path_rate=.1, **self.training).train()
        optimizer = create_optimizer_v2(model, opt='adamw', lr=self.learning_rate, weight_decay=.05)
        x, target = self.images(10), torch.arange(10) % 5
        losses = train(model, optimizer, x, target, steps=25)
        assert losses[-1] < .5 * losses[0]
        assert all(m.num_batches_tracked == 25 for m in model.modules() if isinstance(m, _BatchNorm))
        expected = model.eval()(x)
        assert relative(model.reparameterize()(x), expected) < 1e-5


class RepOptContract(Contract):
    """Like :class:`RePaContract`; a kind is a structure."""
    kinds = ('target', 'search', pytest.param('csla', marks=pytest.mark.slow), 'deploy')
    scriptable = ('target', 'deploy')  # a block's branches are a loop over its declaration, which only tracing unrolls

    @classmethod
    def build(cls, kind, **kwargs):
        return cls.tiny(**(dict(reparameterized=True) if kind == 'deploy' else dict(structure=kind)), **kwargs)

    @classmethod
    def trained(cls, kind):
        return cls.trained_form().reparameterize() if kind == 'deploy' else cls.trained_form(structure=kind)

    @classmethod
    def changed_form(cls):
        return cls.trained_form(scales='ones')
