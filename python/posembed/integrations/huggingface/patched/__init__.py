"""The modules of patched models: ``patched.<module>`` is the shadow of ``<module>``.

They are created on import, so a pickled model loads in a new process.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.removeprefix(f"{__name__}.")
        if name == fullname:
            return None
        try:
            original = importlib.import_module(name)
        except ImportError:
            return None
        package = hasattr(original, "__path__")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package)

    def exec_module(self, module: types.ModuleType) -> None:
        from posembed.integrations.huggingface import _shadow

        _shadow.fill(module)


sys.meta_path.append(_Finder())
