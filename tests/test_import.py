import subprocess
import sys

SCRIPT = """
import os, random, sys, warnings
import timm, torch, numpy

def state():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state().sum().item(),
        random.getstate(), numpy.random.get_state()[1].sum(), dict(os.environ), list(warnings.filters), os.getcwd(),
        torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
    )

modules, before = set(sys.modules), state()
models = set(timm.list_models())
import timm_rep  # also makes timm.optim an attribute of timm, as users type it
timm.optim.create_optimizer_v2
assert state() == before, 'global state changed'
new = {m for m in sys.modules if m not in modules}
# timm.optim is timm's own part that holds the registry of optimizers, and what it brings
import timm.optim
print(sorted(m for m in new if not m.startswith(('timm_rep', 'timm.'))))
assert {'repsgd', 'repadamw'} <= set(timm.optim.list_optimizers())
ours = [set(timm.list_models(name)) for name in ('repa_*', 'repopt_*', 'lvvit_*', 'mixer_t32', 'swin_femto')]
assert all(ours)
assert set(timm.list_models()) - models == set.union(*ours)
assert models <= set(timm.list_models())
"""


def test_import_registers_and_nothing_else():
    """No print, no global state changed, and no module loaded that timm had not, so it costs next to nothing."""
    run = subprocess.run([sys.executable, '-c', SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == '[]\n'
    assert run.stderr == ''


def test_version_has_one_source():
    from importlib.metadata import version

    import timm_rep
    assert version('timm-rep') == timm_rep.__version__
