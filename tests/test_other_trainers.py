"""The page docs/how-to/use-other-trainers.md: ``pytest -m clients``."""
import re
import subprocess
import sys

import pytest
import timm
import torch
import torch.nn.functional as F

from tests.helpers import ROOT, relative
from timm_rep.optim import RepSGD

PAGE = (ROOT / 'docs' / 'how-to' / 'use-other-trainers.md').read_text()
EXAMPLES = dict(re.findall(r'^## ([^\n]+)\n\n```python\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE))
LIBRARIES = {
    'Hugging Face Trainer': 'transformers', 'accelerate': 'accelerate', 'Lightning': 'lightning', 'fastai': 'fastai'}


def test_every_example_is_run():
    assert EXAMPLES.keys() == LIBRARIES.keys()
    assert PAGE.count('```python') == len(EXAMPLES)


def train(optimizer_cls, data, lrs, clip_grad=None, weight_decays=(0., 4e-5)):
    """The model of the examples after a step on all images for each learning rate.

    weight_decays: Of norms and biases, and of the other parameters.
    """
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', num_classes=10).train()
    groups = [dict(params=[p for p in model.parameters() if (p.ndim > 1) == decayed], weight_decay=weight_decay)
              for decayed, weight_decay in enumerate(weight_decays)]
    optimizer = optimizer_cls(groups, lr=.1, momentum=.9, nesterov=True)
    for lr in lrs:
        for group in optimizer.param_groups:
            group['lr'] = lr
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        if clip_grad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
        optimizer.step()
    return model


def distance(model, other, start):
    """Distance of the parameters of two models, relative to how far the second one is from the start."""
    vectors = [torch.nn.utils.parameters_to_vector(m.parameters()).detach().cpu() for m in (model, other, start)]
    return (torch.dist(*vectors[:2]) / torch.dist(*vectors[1:])).item()


@pytest.mark.clients
@pytest.mark.parametrize('name', LIBRARIES)
def test_example(name, tmp_path, monkeypatch):
    """The model is as from a plain loop with RepSGD, not from plain SGD or clipped gradients, and it folds."""
    pytest.importorskip(LIBRARIES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    torch.manual_seed(1)
    data = torch.randn(8, 3, 64, 64), torch.arange(8)
    names = dict(train_set=list(zip(data[0], data[1].tolist())))
    torch.manual_seed(0)
    exec(compile(EXAMPLES[name], name, 'exec'), names)
    trained = names['model']

    lrs = [.1, .05] if name == 'Hugging Face Trainer' else [.1, .1]     # cosine schedule
    weight_decays = (4e-5, 4e-5) if name == 'fastai' else (0., 4e-5)
    torch.manual_seed(0)
    start = timm.create_model('repopt_vgg_a0', num_classes=10)
    expected = train(RepSGD, data, lrs, weight_decays=weight_decays)
    assert distance(trained, expected, start) < 1e-3
    for other in (train(torch.optim.SGD, data, lrs), train(RepSGD, data, lrs, clip_grad=1.)):
        assert distance(other, expected, start) > 1e-2
    if name == 'fastai':
        assert [group['weight_decay'] for group in names['learner'].opt.opt.param_groups] == [4e-5]
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        y = trained.eval()(x)
        assert relative(trained.reparameterize()(x), y) < 1e-4


WITHOUT_IMPORT = {
    'timm': "import timm; timm.create_model('repa_deit_tiny')",
    'timm.optim': "import timm.optim; timm.optim.create_optimizer_v2(timm.create_model('resnet18'), opt='repsgd')",
    'transformers': """
from transformers import AutoModelForImageClassification
AutoModelForImageClassification.from_pretrained('hub/repa_any.cifar10')""",
    'fastai': """
from fastai.vision.all import DataLoaders, vision_learner
vision_learner(DataLoaders([], []), 'repa_deit_tiny', n_out=10, pretrained=False)""",
}


@pytest.mark.clients
@pytest.mark.parametrize('library', WITHOUT_IMPORT)
def test_error_without_import(library):
    """The README has the error that each call raises before timm_rep is imported."""
    pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, '-c', WITHOUT_IMPORT[library]], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    documented = re.findall(r'\| `(\w+Error: .*?)`', PAGE)
    assert any(error.startswith(start) for start in documented), error
