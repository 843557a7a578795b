"""Imports timm_rep after timm, in every Python process with this folder in PYTHONPATH; see ``timm-rep run``.

Python imports a module of this name at startup, before the script's folder is on ``sys.path``. The import of timm is
left to the script, which may have a checkout of timm next to it.
"""
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import PathFinder


class _ImportAfterTimm(importlib.abc.MetaPathFinder):

    def find_spec(self, name, path=None, target=None):
        if name != 'timm':
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            import_timm = spec.loader.exec_module

            def exec_module(module):
                import_timm(module)
                import timm_rep  # noqa: F401

            spec.loader.exec_module = exec_module
        return spec


folder = os.path.dirname(os.path.abspath(__file__))
sys.meta_path.insert(0, _ImportAfterTimm())
sys.path.append(os.path.abspath(os.path.join(folder, *[os.pardir] * 3)))  # of timm_rep, which need not be installed

# Python imports the first sitecustomize only, which would hide one of the system
hidden = PathFinder.find_spec('sitecustomize', [path for path in sys.path if os.path.abspath(path) != folder])
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
