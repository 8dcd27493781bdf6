"""Launches of Triton's kernels that cost the host little.

Triton finds out at every launch what it has compiled for such arguments: it binds them, asks for
each one's type, alignment and value, makes a string of all that, and looks the string up. On the
host that is most of what a launch costs, and a step of eager operations has hundreds of launches.
A kernel under `launched` keeps what Triton compiled under a cheaper key, and calls what puts it on
the stream directly:

    kernel[grid](x, n, ..., num_warps=4)
        key = device, options, x.dtype, x % 16, n % 16, n == 1, ..., values of constants
        known:    launcher(grid, stream, function, address of x, n, ...)
        unknown:  Triton's own launch; what it compiled is kept under the key

A key tells apart at least what Triton tells apart. Whatever this file doesn't know (tuples, hooks
of profilers, other options) is launched by Triton.

Unlike Triton it does not look whether a tensor is on a GPU, except in the first launch with a key.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_TRITONS_RUN = JITFunction.run
# Options of a launch that keys have places for.
_OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
_is_direct = True

# Of tensor descriptors: what differs from launch to launch, and what kernels are compiled for.
_GIVEN = {"base", "shape", "strides"}
_COMPILED = [field.name for field in fields(TensorDescriptor) if field.name not in _GIVEN]
_knows_descriptors = set(_COMPILED) <= {"block_shape", "padding", "round_f32_to_tf32"}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; triton.cdiv, which is made for kernels, costs as much as a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is no less than n; for triton.next_power_of_2 as above."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """That kernels know by the same name."""
    kind: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return kind


def launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, with its options, for kernels that Python launches. Functions that other
    kernels call stay triton.jit's."""
    if function is None:
        return partial(launched, **options)
    compiled = triton.jit(function, **options)
    return LaunchedKernel(compiled) if isinstance(compiled, JITFunction) else compiled


@contextmanager
def launched_by_triton() -> Iterator[None]:
    """All launches inside are Triton's own, as they are while something else is in the place of
    JITFunction.run."""
    global _is_direct
    before, _is_direct = _is_direct, False
    try:
        yield
    finally:
        _is_direct = before


def are_compiled_ahead() -> bool:
    """Whether kernels are compiled for later, and not launched: whoever chooses between several by
    what a step has had better ask for all of them."""
    return not _is_direct


class _Compiled(NamedTuple):
    """What launches with a key need."""

    launcher: Callable[..., Any]
    constants: tuple[Any, ...]  # its arguments between the stream and the kernel's own
    kernel: Any  # of Triton; what a launch returns


class LaunchedKernel:
    """A kernel that is launched as Triton's are, `kernel[grid](...)`. All else is the
    JITFunction's, `function`."""

    def __init__(self, function: JITFunction) -> None:
        self.function = function
        self._kinds: dict[str, set[type]] = {
            param.name: set() for param in function.params if not param.is_constexpr
        }
        self._launch: Callable[..., Any] = self._learn
        self._key: Callable[..., tuple[Any, ...]] | None = None
        self._known: dict[tuple[Any, ...], _Compiled] = {}
        self._lock = threading.Lock()  # of what launches with new keys change
        self._can_bind = all(
            parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            for parameter in function.signature.parameters.values()
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if _is_direct and JITFunction.run is _TRITONS_RUN:
            return partial(self._launch, grid)
        return self.function[grid]

    def _learn(self, _grid: Any, *arguments: Any, **options: Any) -> Any:
        """Launch by Triton, and keep what it compiled."""
        kernel = self.function[_grid](*arguments, **options)
        # Functions that are to be called before each launch, Triton calls.
        if kernel is not None and self._can_bind and not self.function.pre_run_hooks:
            with self._lock:
                self._keep(kernel, arguments, options)
        return kernel

    def _keep(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        names = self.function.signature.parameters
        given = {name: value for name, value in options.items() if name in names}
        given = self.function.signature.bind(*arguments, **given).arguments
        options = {name: value for name, value in options.items() if name not in names}
        kinds = {name: _kind(given.get(name, names[name].default)) for name in self._kinds}
        if object in kinds.values() or not options.keys() <= set(_OPTIONS):
            return
        if any(kind not in self._kinds[name] for name, kind in kinds.items()):
            for name, kind in kinds.items():
                self._kinds[name].add(kind)
            # Keys of other functions may mean something else.
            self._known = {}
            self._key, self._launch = _generate(
                self.function, self._kinds, self._known, self._learn
            )
        assert self._key is not None
        try:
            self._known[self._key(None, **given, **options)] = _Compiled(*_launcher(kernel), kernel)
        except TypeError:  # a constant without a hash
            return


def _launcher(kernel: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Of a compiled kernel: what to call with (the grid's three sizes, a stream, *these arguments,
    *the kernel's).

    That is `kernel.run`, which allocates memory for kernels that need some of their own, and calls
    what C was compiled for this kernel. Where it does no more than put constants before the
    kernel's arguments, that is called instead: a copy that calls a list shows it.
    """
    # of Triton: what the hooks are told, and the hooks before and after the launch
    constants = (kernel.function, kernel.packed_metadata, None, None, None)
    run = kernel.run
    sizes = (getattr(run, f"{name}_scratch_size", 1) for name in ("global", "profile"))
    if any(sizes) or not callable(getattr(run, "launch", None)):
        return run, constants
    seen: list[tuple[Any, ...]] = []
    spied = copy(run)
    spied.launch = lambda *arguments: seen.append(arguments)
    outside = [object() for _ in range(4)]
    own = [object() for _ in range(3)]
    spied(*outside, *constants, *own)
    if len(seen) != 1 or [*seen[0][:4], *seen[0][-3:]] != [*outside, *own]:
        return run, constants
    return run.launch, seen[0][4:-3]


# ---------------------------------------------------------------- the generated functions


class _Unlike(Exception):
    """Arguments of kinds that a generated function is not for."""


def _kind(value: Any) -> type:
    """By which arguments are treated alike; object: not at all."""
    if isinstance(value, Tensor):
        return Tensor
    if value is None:
        return type(None)
    if type(value) is TensorDescriptor and _knows_descriptors:
        return TensorDescriptor
    return type(value) if type(value) in (int, bool, float) else object


def _generate(
    function: JITFunction,
    kinds: dict[str, set[type]],
    known: dict[tuple[Any, ...], _Compiled],
    learn: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that make the key of a launch, and that launch, for arguments of the kinds that
    were seen. Source is written for each kernel: to go through lists of its parameters at every
    launch would cost as much as is saved."""
    writer = _Writer(function.signature.parameters)
    for param in function.params:
        writer.add(param, kinds.get(param.name, set()))
    scope = {
        **{"_known": known, "_learn": learn, "_hooks": knobs.runtime},
        **{"_Unlike": _Unlike, "_widths": _widths, "_mixed": _mixed},
        **{"TensorDescriptor": TensorDescriptor},
        **{"_device_now": _current_device, "_stream_now": _current_stream},
    }
    for name, parameter in function.signature.parameters.items():
        scope[f"_default_{name}"] = parameter.default
    exec(compile(writer.source(), f"<launches of {function.fn.__qualname__}>", "exec"), scope)
    return scope["_key_of"], scope["_launch"]


class _Writer:
    """Writes the functions of one kernel."""

    def __init__(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        self._signature = ["_grid"]
        for name, parameter in parameters.items():
            has_default = parameter.default is not inspect.Parameter.empty
            self._signature.append(f"{name}=_default_{name}" if has_default else name)
        self._names = list(parameters)
        self._prepare: list[str] = []
        self._key = ["_device", *_OPTIONS]
        self._passed: list[str] = []
        self._aligned: list[str] = []  # addresses
        self._integers: list[str] = []
        self._classes: dict[str, list[str]] = {}  # of neither addresses nor constants: their names

    def add(self, param: Any, kinds: set[type]) -> None:
        """A parameter of which arguments of these kinds were seen; none: a constant."""
        name = param.name
        if kinds <= {Tensor, type(None)} and Tensor in kinds:
            self._add_address(param, type(None) in kinds)
        elif kinds == {type(None)}:
            self._prepare.append(f"if {name} is not None: raise _Unlike")
            self._passed.append("None")
        elif kinds == {TensorDescriptor}:
            self._classes.setdefault(TensorDescriptor.__name__, []).append(name)
            self._key.append(f"{name}.base.dtype")
            self._key += [
                f"tuple({name}.block_shape)" if part == "block_shape" else f"{name}.{part}"
                for part in _COMPILED
            ]
            self._passed.append(name)
        elif len(kinds) == 1:
            (kind,) = kinds
            self._classes.setdefault(kind.__name__, []).append(name)
            if kind is int:
                self._add_integer(param)
            self._passed.append(name)
        else:
            # A constant, or what is now this, now that: Triton's own questions, in Python.
            self._key.append(f"_mixed({name})" if kinds else name)
            self._passed.append(name)

    def _add_address(self, param: Any, optional: bool) -> None:
        name, address = param.name, f"_at_{param.name}"
        if optional:
            self._prepare += [
                f"if {name} is None: {address} = 0; _type_{name} = None",
                f"else: {address} = {name}.data_ptr(); _type_{name} = {name}.dtype",
            ]
            self._key.append(f"_type_{name}")
        else:
            self._prepare.append(f"{address} = {name}.data_ptr()")
            self._key.append(f"{name}.dtype")
        if not param.do_not_specialize and not param.do_not_specialize_on_alignment:
            self._aligned.append(address)
        self._passed.append(address)

    def _add_integer(self, param: Any) -> None:
        name = param.name
        self._integers.append(name)
        if param.do_not_specialize:
            return
        if param.do_not_specialize_on_alignment:
            self._key.append(f"{name} == 1")
        else:  # 0: of multiples of 16; 1; 2: of 1
            self._key.append(f"{name} & 15 and ({name} != 1 or 2)")

    def source(self) -> str:
        """Of both functions."""
        for kind, names in self._classes.items():
            same = " is ".join(f"{name}.__class__" for name in names)
            self._prepare.append(f"if not ({same} is {kind}): raise _Unlike")
        if self._aligned:
            # Mostly all are; then a zero says so for all of them.
            each = "".join(f"{address} & 15 == 0, " for address in self._aligned)
            self._key.append(f"({' | '.join(self._aligned)}) & 15 and ({each})")
        if self._integers:
            listed = ", ".join(self._integers)
            self._key.append(f"({' | '.join(self._integers)}) >> 31 and _widths({listed})")
        options = ", ".join(f"{name}=None" for name in _OPTIONS)
        same = ", ".join(f"{name}={name}" for name in self._names)
        sizes = "_grid[0], _grid[1] if _n > 1 else 1, _grid[2] if _n > 2 else 1"
        prepare = "\n        ".join(["_device = _device_now()", *self._prepare])
        key, passed = ", ".join(self._key), ", ".join(self._passed)
        return f"""
def _key_of({", ".join(self._signature)}, {options}):
    if True:
        {prepare}
    return ({key},)

def _launch({", ".join(self._signature)}, {options}, **_options):
    try:
        if _options or _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls:
            raise _Unlike
        {prepare}
        _launcher, _constants, _kernel = _known[{key},]
        _n = len(_grid)
    except (KeyError, AttributeError, TypeError, _Unlike):
        for _name in {_OPTIONS}:
            if (_value := locals()[_name]) is not None: _options[_name] = _value
        return _learn(_grid, {same}, **_options)
    _launcher({sizes}, _stream_now(_device), *_constants, {passed})
    return _kernel
"""


def _widths(*integers: int) -> tuple[int, ...]:
    """32 or 64 bits of integers with a sign, or 65: of 64 without."""
    return tuple(
        32 if -(2**31) <= n < 2**31 else 64 if -(2**63) <= n < 2**63 else 65 for n in integers
    )


def _mixed(value: Any) -> Any:
    """What Triton may tell apart of an argument that has been of several kinds."""
    kind = _kind(value)
    if kind is object:
        raise _Unlike
    if kind is TensorDescriptor:
        return TensorDescriptor, value.base.dtype, *(str(getattr(value, n)) for n in _COMPILED)
    if kind is Tensor:
        return value.dtype, value.data_ptr() % 16 == 0
    if kind is int:
        return int, value == 1, value % 16 == 0, *_widths(value)
    return kind


# As Triton does it, but without looking whether CUDA was initialised: it was in the first launch.
def _current_device() -> int:
    return int(torch._C._cuda_getDevice())


def _current_stream(device: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device))


if hasattr(torch._C, "_cuda_getDevice"):
    _current_device = torch._C._cuda_getDevice
    _current_stream = torch._C._cuda_getCurrentRawStream
