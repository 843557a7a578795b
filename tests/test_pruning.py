"""The other methods that conversions are compared with: what they keep, and what refitting is worth."""
import copy

import pytest
import timm
import torch

from timm_rep.utils.profiling import count_macs


@pytest.fixture
def methods(load_script):
    return load_script('experiments/pruning').METHODS


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=5)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1. if 'norm' in name and 'weight' in name else 0., 0.3)
    return model.eval()


def test_all_channels_kept(methods, model):
    """The function stays, and so does each refitted layer up to the rounding of float32."""
    x = torch.randn(8, 3, 16, 16)
    for name, prune in methods.items():
        pruned = copy.deepcopy(model)
        prune(pruned, [x], 1.)
        torch.testing.assert_close(pruned(x), model(x), msg=name)


def test_channels_without_an_effect_are_removed_exactly(methods, model):
    """Hidden channels that are always zero: every method but the first channels keeps the function."""
    x = torch.randn(64, 3, 16, 16)
    for block in model.blocks:
        with torch.no_grad():
            block.mlp.fc1.weight[::2] = 0.
            block.mlp.fc1.bias[::2] = 0.
    for name, prune in methods.items():
        pruned = copy.deepcopy(model)
        prune(pruned, [x], 0.5)
        assert pruned.blocks[0].mlp.fc1.out_features + pruned.blocks[1].mlp.fc1.out_features == 96
        error = ((pruned(x) - model(x)).norm() / model(x).std(0).norm()).item()
        assert error > 0.1 if name == 'first channels' else error < 0.02, (name, error)


def test_refitting_is_worth_something(methods, model):
    x = torch.randn(256, 3, 16, 16)
    errors = {}
    for name, prune in methods.items():
        pruned = copy.deepcopy(model)
        prune(pruned, [x], 0.5)
        assert count_macs(pruned, (3, 16, 16)).total < 0.8 * count_macs(model, (3, 16, 16)).total
        errors[name] = (pruned(x) - model(x)).square().mean().item()
    assert errors['refitted pruning'] < errors['VBP'] < errors['first channels']
