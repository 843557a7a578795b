"""Every family of timm: the converted FFNs against a plain float64 least-squares fit."""
import copy

import pytest
import timm
import torch
import torch.nn.functional as F

from tests.convert.families import FAMILIES, KINDS, build
from tests.helpers import images, relative
from timm_rep.convert import linearize_ffns
from timm_rep.convert.ffn import find_ffns
from timm_rep.layers import RePaMlpDeploy
from timm_rep.utils.profiling import count_macs


def deploy_layer(module):
    return next(m for m in module.modules() if isinstance(m, RePaMlpDeploy))


@torch.no_grad()
def record(module, layers, run):
    """Inputs of the layers during run(), tokens in rows, in float64."""
    seen = [[] for _ in layers]
    hooks = [layer.register_forward_pre_hook(lambda _, args, s=s: s.append(args[0].clone()))
             for layer, s in zip(layers, seen)]
    run()
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def outputs(module, layer, calls):
    """Outputs of a layer of a module that is called with each of these inputs."""
    seen = []
    hook = layer.register_forward_hook(lambda _, args, out: seen.append(out.clone()))
    for x in calls:
        module(x.clone())
    hook.remove()
    return seen


def rows(xs, use_conv):
    xs = [(x.movedim(1, -1) if use_conv else x) for x in xs]
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in xs]).double()


def nearest(a, b):
    """For every column of a the nearest column of b, and the largest distance, relative to the scale of b's."""
    distance = (a[:64].T[:, None] - b[:64].T[None]).abs().amax(2) / (b.square().mean(0).sqrt() + 1e-6)
    error, index = distance.min(1)
    return error.max(), index


@torch.no_grad()
def check_ffn(ffn, new, calls, lost_variance):
    """Compare a converted FFN with the fit to its inputs of the outputs of the original one."""
    inline = type(new) is type(ffn.module)  # a block, which has more layers than the FFN
    out, fitted = (
        rows(outputs(module, layer, calls), ffn.use_conv) for module, layer in (
            (ffn.module, ffn.last if inline else ffn.module), (new, deploy_layer(new) if inline else new)))
    u, g = record(ffn.module, (ffn.first, ffn.last), lambda: [ffn.module(x.clone()) for x in calls])
    u, g = rows(u, ffn.use_conv), rows(g, ffn.use_conv)
    deploy = deploy_layer(new)
    parts = [u.new_ones(len(u), 1), *([u] if deploy.has_idle else [])]
    if deploy.has_active:
        active, = record(new, [deploy.fc_out], lambda: [new(x.clone()) for x in calls])
        active = rows(active, ffn.use_conv)
        if ffn.hidden_norm is None:
            # active channels are hidden features of the original FFN, each another one
            error, index = nearest(active, g)
            assert error < 1e-3
            index = index[active.std(0) > 1e-6]  # dead channels are equal
            assert len(set(index.tolist())) == len(index)
        else:
            inner, = record(new, [deploy.act[1]], lambda: [new(x.clone()) for x in calls])
            before, = record(ffn.module, [ffn.hidden_norm], lambda: [ffn.module(x.clone()) for x in calls])
            inner, before = rows(inner, ffn.use_conv), rows(before, ffn.use_conv)
            error, index = nearest(inner, before)
            norm = ffn.hidden_norm
            assert error < 1e-3
            assert len(set(index.tolist())) == inner.shape[1]
            expected = F.layer_norm(
                before[:, index], (len(index),), norm.weight[index].double(), norm.bias[index].double(), norm.eps)
            assert relative(active, expected) < 1e-4
        parts.append(active)
    design = torch.cat(parts, 1)
    # column scaling, and the minimum-norm solution where columns are collinear
    solution = torch.linalg.lstsq(design / design.norm(dim=0).clamp(min=1e-9), out, rcond=1e-7, driver='gelsd').solution
    reference = design / design.norm(dim=0).clamp(min=1e-9) @ solution
    variance = out.var(0, correction=0).sum()
    best = (out - reference).square().mean(0).sum() / variance
    measured = (out - fitted).square().mean(0).sum() / variance
    assert (fitted - reference).square().mean(0).sum() / variance < 1e-4 * best + 1e-5
    assert lost_variance == pytest.approx(measured.item(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    'family', [f if f in KINDS else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
@torch.no_grad()
def test_family(family):
    model, x = build(family)
    original, before = copy.deepcopy(model), model(x)
    ffns, _ = find_ffns(original)
    assert ffns
    ffns = {ffn.name: ffn for ffn in ffns}
    report = linearize_ffns(model, [x], idle_ratio=.5, ridge=1e-10, tokens_per_image=1 << 20, compensate=False)
    assert {ffn.name for ffn in report.ffns} | report.kept.keys() >= ffns.keys()
    assert not find_ffns(model)[0] or report.kept
    converted = [model.get_submodule(ffn.name) for ffn in report.ffns]
    outputs = []
    calls = record(model, converted, lambda: outputs.append(model(x)))
    for ffn, new, seen in zip(report.ffns, converted, calls):
        check_ffn(ffns[ffn.name], new, seen, ffn.lost_variance)
    after, = outputs
    assert after.isfinite().all()
    assert report.macs[1] == count_macs(model, x.shape[1:]).total < report.macs[0]

    # nothing idle: the same function
    model = copy.deepcopy(original)
    linearize_ffns(model, [x], idle_ratio=0.)
    assert relative(model(x), before) < 1e-5


@torch.no_grad()
def test_layers_after_an_ffn_stay():
    """RDNet's BlockESE has squeeze-and-excitation after its FFN, so that its output is not linear in the fit."""
    torch.manual_seed(0)
    model = timm.create_model(
        'rdnet_tiny', growth_rates=(16, 16), num_blocks_list=(2, 1), block_type=('Block', 'BlockESE'),
        is_downsample_block=(None, True), num_init_features=16, ls_init_value=.5, num_classes=5).eval()
    x = images(32, 64)
    original, before = copy.deepcopy(model), model(x)
    with_ese = [name for name, m in model.named_modules() if type(m).__name__ == 'BlockESE']
    assert [ffn.name for ffn in find_ffns(model)[0]][-1] == f'{with_ese[0]}.layers'
    report = linearize_ffns(model, [x], idle_ratio=.5, ridge=1e-10)
    block, old = model.get_submodule(with_ese[0]), original.get_submodule(with_ese[0])
    assert len(report.ffns) == 3
    assert [type(m) for m in block.layers] == [type(old.layers[i]) for i in (0, 1)] + [
        RePaMlpDeploy, type(old.layers[5])]
    assert torch.equal(block.layers[3].fc.weight, old.layers[5].fc.weight)
    model = copy.deepcopy(original)
    linearize_ffns(model, [x], idle_ratio=0.)
    assert relative(model(x), before) < 1e-5
