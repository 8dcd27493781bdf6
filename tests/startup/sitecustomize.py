"""Spares the processes of a test run what transformers does each time that it is imported: it reads
the 3,400 files of its models to learn which one defines which name, 0.7 s of processor time. Here
the first process keeps what it found, beside the bytecode, and the others read it.

On PYTHONPATH (tools/run_tests.sh), Python imports this at its start."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE = "transformers.utils.import_utils"
FUNCTION = "define_import_structure"


class Finder:
    """Finds the module with that function once, as Python does, and puts another one in place."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(Finder)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                setattr(module, FUNCTION, keeping(getattr(module, FUNCTION), sys.pycache_prefix))

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def keeping(define: Callable[..., Any], folder: str | None) -> Callable[..., Any]:
    """`define`, whose result for a folder and a prefix is kept in `folder` until a file is put into
    the former or taken from there."""

    def define_or_read(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is None or folder is None:  # of a single model: a few files
            return define(module_path, prefix)
        import os
        import pickle
        import zlib

        name = f"{module_path} {os.stat(module_path).st_mtime_ns} {prefix} {sys.version}"
        file = os.path.join(folder, f"import_structure_{zlib.crc32(name.encode()):08x}.pickle")
        try:
            with open(file, "rb") as kept:
                known, structure = pickle.load(kept)
            if known == name:
                return structure
        except (OSError, EOFError, pickle.UnpicklingError, ValueError):
            pass
        structure = define(module_path, prefix)
        own = f"{file}.{os.getpid()}"  # several processes may find it at the same time
        try:
            os.makedirs(folder, exist_ok=True)
            with open(own, "wb") as written:
                pickle.dump((name, structure), written)
            os.replace(own, file)
        except OSError:  # then the next process looks again
            pass
        return structure

    return define_or_read


if sys.pycache_prefix is not None:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
