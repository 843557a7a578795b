"""Imports timm_rep after timm, in every Python process with this folder in PYTHONPATH; see ``timm-rep run``.

Python imports a module of this name at startup, before the script's folder is on ``sys.path``. The import of timm is
left to the script, which may have a checkout of timm next to it.
"""
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Optional, Sequence


class _ImportAfterTimm(importlib.abc.MetaPathFinder):
    is_searching = False

    def find_spec(
            self,
            name: str,
            path: Optional[Sequence[str]] = None,
            target: Optional[ModuleType] = None,
    ) -> Optional[ModuleSpec]:
        if name != 'timm' or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        loader: Any = spec and spec.loader
        if loader is not None:  # not before the import: others only look whether timm can be found
            import_timm = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                import_timm(module)
                sys.meta_path.remove(self)
                import timm_rep  # noqa: F401

            loader.exec_module = exec_module
        return spec


folder = os.path.dirname(os.path.abspath(__file__))
sys.meta_path.insert(0, _ImportAfterTimm())
sys.path.append(os.path.abspath(os.path.join(folder, *[os.pardir] * 3)))  # timm_rep may not be installed

# Python imports only the first sitecustomize on the path: run the one that this module hides, if any
hidden = PathFinder.find_spec('sitecustomize', [path for path in sys.path if os.path.abspath(path) != folder])
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
