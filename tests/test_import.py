"""import timm_rep: what it registers, and that it does nothing else."""
import ast
import graphlib
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from types import ModuleType

from tests.helpers import ROOT

PACKAGE = ROOT / 'timm_rep'
SCRIPT = """
import builtins, glob, io, os, random, sys, warnings
import timm, torch, numpy

def state():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state().sum().item(),
        random.getstate(), numpy.random.get_state()[1].sum(), dict(os.environ), list(warnings.filters), os.getcwd(),
        torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
    )

# whatever opens a file or lists a folder, except Python's own import system
read = []
def counted(module, name):
    function = getattr(module, name)
    def call(*args, **kwargs):
        if 'importlib' not in sys._getframe(1).f_code.co_filename:
            read.append((name, args[:1]))
        return function(*args, **kwargs)
    setattr(module, name, call)
    return lambda: setattr(module, name, function)

restore = [counted(*function) for function in (
    (builtins, 'open'), (io, 'open'), (os, 'open'), (os, 'listdir'), (os, 'scandir'), (glob, 'glob'), (glob, 'iglob'))]
modules, before = set(sys.modules), state()
models = set(timm.list_models())
import timm_rep  # also makes timm.optim an attribute of timm, as users type it
for function in restore:
    function()
timm.optim.create_optimizer_v2
assert state() == before, 'global state changed'
assert not read, read
new = {m for m in sys.modules if m not in modules}
# timm.optim is timm's own part that holds the registry of optimizers, and what it brings
import timm.optim
new -= {'_statistics', 'statistics'}  # timm 1.0.26 does not load them
print(sorted(m for m in new if not m.startswith(('timm_rep', 'timm.'))))
assert {'repsgd', 'repadamw'} <= set(timm.optim.list_optimizers())
ours = [set(timm.list_models(name)) for name in ('repa_*', 'repopt_*', 'lvvit_*', 'mixer_t32', 'swin_femto')]
assert all(ours)
assert set(timm.list_models()) - models == set.union(*ours)
assert models <= set(timm.list_models())

# the tags do not depend on a folder
listed = timm.list_pretrained(['repa_*', 'repopt_*', 'lvvit_*'])
released = [f'repa_{name}.in1k' for name in (
    'deit_tiny', 'deit_small', 'deit_base', 'vit_large', 'vit_huge', 'swin_tiny', 'swin_small', 'swin_base')]
shipped = ['repa_any.cifar10', 'repa_any.cifar10_converted', 'repopt_vgg_a0.cifar10']
assert set(listed) == {*released, *shipped}, listed
for name in set.union(*ours):
    cfg = timm.get_pretrained_cfg(name)
    assert cfg.num_classes == 1000 and cfg.tag == ('in1k' if f'{name}.in1k' in released else 'untrained'), name
for name in listed:
    assert timm.get_pretrained_cfg(name).hf_hub_id == f'timm-rep/{name}'
"""


def test_import_registers_and_nothing_else(tmp_path):
    """No print, no global state changed, no file read, no folder listed, and no module loaded that timm does not load.

    Folders of published models do not change the tags and defaults, whatever they are called.
    """
    for name in ('repa_deit_tiny.', 'repa_deit_tiny.x*', 'repopt_vgg_a0.mine'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'config.json').write_text('{"architecture": "repa_deit_tiny", "num_classes": 3}')
    run = subprocess.run(
        [sys.executable, '-c', SCRIPT], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, 'TIMM_REP_HUB': str(tmp_path)})
    assert run.returncode == 0, run.stderr
    assert run.stdout == '[]\n'
    assert run.stderr == ''


def test_no_module_is_shadowed_by_a_function():
    """A module is private where its package has a function of its name: import timm_rep.x gives a module."""
    import timm_rep

    for module in pkgutil.walk_packages(timm_rep.__path__, 'timm_rep.'):
        parent, _, name = module.name.rpartition('.')
        found = getattr(importlib.import_module(parent), name, None)  # None: not imported so far
        assert found is None or isinstance(found, ModuleType), module.name


def test_version_has_one_source():
    from importlib.metadata import version

    import timm_rep
    assert version('timm-rep') == timm_rep.__version__


def _imported(path):
    """Parts of the package that a module imports, anywhere in it; '' for the package itself."""
    package = ('timm_rep', *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = '.'.join(package[:len(package) - node.level + 1]) + '.' if node.level else ''
            module = (base + (node.module or '')).rstrip('.')
            names = [f'{module}.{alias.name}' for alias in node.names]
        else:
            continue
        for name in names:
            if name.split('.')[0] == 'timm_rep':
                part = name.split('.')[1] if '.' in name else ''
                yield part if (PACKAGE / part).is_dir() or (PACKAGE / f'{part}.py').is_file() else ''


def test_imports_point_one_way():
    """No circle, inside functions neither; each folder imports what docs/architecture.md says."""
    imports = {}
    for path in PACKAGE.rglob('*.py'):
        part = path.relative_to(PACKAGE).parts[0].removesuffix('.py').replace('__init__', '')
        imports.setdefault(part, set()).update(set(_imported(path)) - {part})
    list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError
    table = re.findall(r'^\| `(\w+)/` \|.*\| (.*) \|$', (ROOT / 'docs' / 'architecture.md').read_text(), re.MULTILINE)
    folders = {path.name for path in PACKAGE.iterdir() if (path / '__init__.py').is_file()}
    above = []
    for folder, listed in table:
        found = imports[folder] & folders
        assert found <= {*above}, folder
        assert listed == 'everything' or found == set(re.findall(r'`(\w+)`', listed)), folder
        above.append(folder)
    assert sorted(above) == sorted(folders)
