from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock

import timm_rep
from tests import helpers
from tests.helpers import TINY, randomize_, relative
from tests.models import contract
from tests.models.contract import RePaContract
from tests.reference import ffn

VARIANTS = ['repa_swin_base', 'repa_swin_small', 'repa_swin_tiny']
tiny = partial(helpers.tiny, 'repa_swin_tiny')
images = partial(helpers.images, size=56)


def blocks(model):
    return [block for stage in model.layers for block in stage.blocks]


def trained(**kwargs):
    return randomize_(tiny(**kwargs))


def test_registered():
    assert timm.list_models(module='repa_swin') == VARIANTS


def test_fused_attention():
    """timm leaves it to a switch whether its Swin has it: the same function, folded too, and the windows shifted."""
    model, x, outputs = trained(), images(), []
    attentions = [module for module in model.modules() if hasattr(module, 'fused_attn')]
    assert len(attentions) == 4
    for fused in (False, True):
        for module in attentions:
            module.fused_attn = fused
        outputs.append(model(x))
    assert not torch.equal(*outputs)
    for output in (outputs[1], model.reparameterize()(x)):
        assert relative(output, outputs[0]) < 1e-5


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name == 'repa_swin_tiny' else pytest.mark.slow) for name in VARIANTS])
def test_everything_but_the_ffns_is_timms(name):
    model = timm.create_model(name, device='meta')
    vanilla = timm.create_model(f'{name.removeprefix("repa_")}_patch4_window7_224', device='meta')

    def rest(m):
        return {k: v.shape for k, v in m.state_dict().items() if '.mlp.' not in k and '.norm2.' not in k}

    assert rest(model) == rest(vanilla)
    assert [b.shift_size for b in blocks(model)] == [b.shift_size for b in blocks(vanilla)]
    assert [b.mlp.fc1.weight.shape for b in blocks(model)] == [b.mlp.fc1.weight.shape for b in blocks(vanilla)]
    assert model.no_weight_decay() == vanilla.no_weight_decay()


@torch.no_grad()
def test_block_is_attention_and_ffn():
    """x + attn(norm(x)), then the FFN by its definition."""
    block = blocks(trained())[1]
    assert block.shift_size == (3, 3)
    x = torch.randn(2, 14, 14, 24)
    y = (x + block._attn(block.norm1(x))).reshape(-1, 24).double()
    weights = {k: v.double() for k, v in block.mlp.state_dict().items()}
    expected = (y + ffn(y, weights, F.gelu, active=24)).view(2, 14, 14, 24)
    assert relative(block(x), expected) < 1e-5


def test_initialization_and_drop_path_are_timms():
    model = tiny(embed_dim=96, drop_path_rate=.3, proj_drop_rate=.1)
    torch.manual_seed(0)
    vanilla = SwinTransformer(**{**TINY['repa_swin'], 'embed_dim': 96, 'drop_path_rate': .3})
    for ours, theirs in zip(blocks(model), blocks(vanilla)):
        for fc in (ours.mlp.fc1, ours.mlp.fc2):
            assert abs(fc.weight.std().item() - .02) < .001
            assert fc.bias.abs().max() == 0
        assert type(ours.drop_path2) is type(theirs.drop_path2)
        if isinstance(theirs.drop_path2, DropPath):
            assert ours.drop_path2.drop_prob == theirs.drop_path2.drop_prob
        assert ours.mlp.drop1.p == .1
        assert type(ours) is SwinTransformerBlock
    assert blocks(tiny(weight_init='skip'))[0].mlp.fc1.bias.abs().max() > 0


@pytest.mark.parametrize('kwargs', [
    dict(), dict(idle_ratio=0.), dict(idle_ratio=1.), dict(idle_ratio=.4, mlp_ratio=2.5),
    dict(idle_schedule='linear'), dict(window_size=4, img_size=64),
], ids=str)
def test_reparameterize_is_exact(kwargs):
    contract.check_reparameterize(trained(**kwargs), partial(tiny, **kwargs), images(size=kwargs.get('img_size', 56)))


@torch.no_grad()
def test_recorded_outputs(recorded):
    tensors, config = recorded('repa_swin')
    args = {k: config[k] for k in ('img_size', 'embed_dim', 'depths', 'num_heads', 'window_size', 'num_classes')}
    model = timm.create_model('repa_swin_tiny', **args)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    assert timm_rep.load_released(model, weights) is model
    model.eval()
    assert relative(model(tensors['input']), tensors['output']) < 1e-5
    assert relative(model.reparameterize()(tensors['input']), tensors['output_reparameterized']) < 1e-5
    assert sum(p.numel() for p in model.parameters()) == config['parameters_reparameterized']
    deeper = timm.create_model('repa_swin_tiny', **dict(args, depths=(2, 2, 2), num_heads=(2, 4, 8)))
    with pytest.raises(RuntimeError, match=r'(?s)fits RePaSwin.*missing: layers\.1\.downsample'):
        timm_rep.load_released(deeper, weights)


class TestContract(RePaContract):
    """The interface of timm's Swin, in both structures."""
    variants = VARIANTS
    tiny, trained_form = map(staticmethod, (tiny, trained))
    size = 56
    block = 'layers.1.blocks.1'
    layers = 1 + 2 * 2 + 1  # stem, blocks, head
    taps = ((2, 24, 14, 14), (2, 48, 7, 7))
    features = ((24, 4, (2, 14, 14, 24)), (48, 8, (2, 7, 7, 48)))
    arguments = (
        (dict(num_classes=0), (2, 48)),
        (dict(num_classes=0, global_pool=''), (2, 7, 7, 48)),
        (dict(in_chans=1), (2, 5)),
        (dict(mlp_ratio=2.), (2, 5)),
        (dict(drop_rate=.1, proj_drop_rate=.1, attn_drop_rate=.1, drop_path_rate=.2), (2, 5)),
    )

    def test_meta(self, kind, model):
        """As in timm, tensors outside the state dict, the indices and masks of the windows, are made again."""
        meta = self.build(kind, device='meta')
        assert all(t.is_meta for t in meta.state_dict().values())
        empty = self.build(kind, device='meta').reparameterize()
        assert empty(torch.empty(2, 3, 56, 56, device='meta')).shape == (2, 5)
        meta.to_empty(device='cpu')
        for module in meta.modules():
            if hasattr(module, 'init_non_persistent_buffers'):
                module.init_non_persistent_buffers()
        meta.load_state_dict(model.state_dict())
        assert torch.equal(meta.eval()(images()), model(images()))

    @torch.no_grad()
    def test_image_sizes(self, model, kind):
        model.set_input_size(img_size=(112, 84), window_size=(7, 7))
        assert model(torch.randn(1, 3, 112, 84)).shape == (1, 5)
        dynamic = tiny(strict_img_size=False, reparameterized=kind == 'deploy').eval()
        assert dynamic(images(size=112)).shape == (2, 5)
