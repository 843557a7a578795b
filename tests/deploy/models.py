"""A tiny model of every family, in what it is trained as."""
import timm
import torch
import torch.nn as nn

from tests.helpers import TINY, randomize_, tiny

VIT = TINY['repa_vit']

# model and size of its images, by family
MODELS = {
    'repa_vit': lambda: (tiny('repa_deit_tiny'), 32),
    'repa_swin': lambda: (tiny('repa_swin_tiny'), 56),
    'repa_mixer': lambda: (tiny('repa_mixer_s32'), 64),
    'repa_poolformer': lambda: (tiny('repa_poolformer_s12'), 64),
    'repa_lvvit': lambda: (tiny('repa_lvvit_s'), 64),
    'repa_any, batch': lambda: (
        timm.create_model('repa_any', base='deit3_small_patch16_224', norm='batch', **VIT), 32),
    'repa_any, keep': lambda: (timm.create_model('repa_any', base='deit3_small_patch16_224', **VIT), 32),
    'repopt_vgg': lambda: (tiny('repopt_vgg_a0'), 64),
    'repopt_vgg, se': lambda: (tiny('repopt_vgg_l2se'), 64),
    'repopt_vgg, search': lambda: (tiny('repopt_vgg_a0', structure='search'), 64),
    'repopt_ghostnet': lambda: (tiny('repopt_ghostnet_050'), 64),
    'repopt_any': lambda: (timm.create_model('repopt_any', base='mobileone_s0', num_classes=5), 64),
}


@torch.no_grad()
def build(kind):
    """A model with the weights of no initialization, a classifier that is not zero included; and its input size."""
    torch.manual_seed(0)
    model, size = MODELS[kind]()
    randomize_(model)
    for layer in model.get_classifier() if isinstance(model.get_classifier(), tuple) else [model.get_classifier()]:
        nn.init.normal_(layer.weight)
    return model, (3, size, size)
