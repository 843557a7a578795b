"""Small published models, and their files."""
import shutil

import timm
import torch

from tests.helpers import normal_scales
from timm_rep.hub._folder import save_folder, write_hashes
from timm_rep.scales import Scales

REPA = ('repa_deit_tiny', dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3))
REPOPT = ('repopt_vgg_a0', dict(depths=(1, 2, 1, 1), widths=(8, 16, 16, 24), stem_width=8))


def trained(name, args, seed=0, classes=5, **kwargs):
    """A model whose BatchNorm statistics are not the initial ones."""
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes, **args, **kwargs)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key.endswith('running_mean'):
                value.normal_()
            elif key.endswith('running_var'):
                value.uniform_(.5, 2)
    return model.eval()


def write_folder(folder, model, args, **kwargs):
    """Write a model into a folder named MODEL.TAG."""
    save_folder(model, folder, model_args=args, tag=folder.name.partition('.')[2], **kwargs)


def same(a, b):
    """Whether two models have the same state dict."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def publish(folder, kind=REPA, seed=0, **kwargs):
    """Write a published model into a folder, and return the model and the files, as bytes by name."""
    name, args = kind
    scales = None
    if kind is REPOPT:
        kwargs['scales'] = False
        scales = Scales(normal_scales(timm.create_model(name, **args), seed=1))
    model = trained(name, args, seed, **kwargs)
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, model, args, scales=scales)
    write_hashes(folder)
    return model, {path.name: path.read_bytes() for path in folder.iterdir()}
