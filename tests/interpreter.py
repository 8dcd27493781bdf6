"""Makes Triton's interpreter about four times as fast, and its FP8 (e4m3) numbers those of the
devices: imported by tests that run kernels in it."""

from __future__ import annotations

import inspect
import operator as operators
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

try:
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
except ImportError:  # the tests that need it are skipped
    interpreter = None

_patched: set[int] = set()  # in one launch: functions' globals, and languages
_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_common_types: dict[tuple[Any, ...], Any] = {}
_builtins: dict[int, list[tuple[str, Any]]] = {}  # by the module or class
_RANGES = {"int32": 1 << 31, "int64": 1 << 63, "fp32": 0}  # 0: of any number
_INTEGERS = {"int1", "int32", "int64"}
_COMPARISONS = {
    "lt": "less_than",
    "le": "less_equal",
    "gt": "greater_than",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
_numpy_dtypes: dict[str, np.dtype[Any]] = {}
_bool_types: dict[tuple[int, ...], Any] = {}
# Which numbers need a look when a handle is made: wider ones, and those of other types.
_BYTES = {"int1": 1, "int32": 4, "int64": 8, "fp16": 2, "bf16": 2, "fp32": 4, "fp8e4nv": 1}
# Whose casts are numpy's.
_CASTS = {
    *(("int32", "int64"), ("int64", "int32"), ("int32", "fp32"), ("int64", "fp32")),
    *(("fp16", "fp32"), ("fp32", "fp16"), ("fp32", "int32")),
}


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel's function, whose language is patched once a launch and not once a call: going
    through all names of `triton.language` takes longer than what most such functions do."""
    if (names := id(self.fn.__globals__)) not in _patched:
        if not (languages := _languages(self.fn)) <= _patched:
            interpreter._patch_lang(self.fn)
        _patched.update({names}, languages)
    return self.rewrite()(*args, **kwargs)


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()  # the end of the launch before restored some of it
    _patched.update(_languages(self.fn))
    return _launch_plainly(self, *args, **kwargs)


def _languages(function: Any) -> set[int]:
    """What _patch_lang patches for it."""
    return {
        id(module) for module in function.__globals__.values() if module is tl or module is tl.core
    }


def _convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """From and to FP8 as torch does: the interpreter rounds halves up, some of them to half of what
    they should be, and takes a NaN for 480. From and to bfloat16 as the interpreter does, without
    a loop over bits, and right where numbers are smaller than 2 ** -126, too."""
    if source is tl.bfloat16 and target is tl.float32:
        return values.astype(np.uint32) << np.uint32(16)
    if source is tl.float32 and target is tl.bfloat16 and rounding is None:  # towards zero
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if tl.float8e4nv not in (source, target):
        return _convert_float_plainly(values, source, target, rounding)
    numbers = torch.from_numpy(np.ascontiguousarray(values)).view(_torch_dtype(source))
    converted = numbers.float().to(_torch_dtype(target))
    return converted.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Blocks of the same shape as they are: the language copies both, since it compares the shape
    as a tuple with one as a list. A scalar without a type that is made for nothing else."""
    ours, theirs = lhs.type, rhs.type
    if ours.is_block():
        if not theirs.is_block():
            return lhs, _filled(rhs, ours)
        if ours.shape.values == theirs.shape.values:
            return lhs, rhs
    elif theirs.is_block():
        return _filled(lhs, theirs), rhs
    return _broadcast_plainly(self, lhs, rhs)


def _filled(scalar: Any, like: Any) -> Any:
    dtype = scalar.dtype
    data = np.full(like.shape, scalar.handle.data, _numpy_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, like.shape))


def _equal_dtypes(self: Any, other: Any) -> bool:
    return self is other or bool(_equal_dtypes_plainly(self, other))


def _block_type(self: Any, element: Any, shape: Any) -> None:
    """What only the shape says is worked out once."""
    values = tuple(shape.values if isinstance(shape, tl.tuple) else shape)
    if any(type(value) is not int for value in values):
        _block_type_plainly(self, element, shape)
        return
    if (known := _shapes.get(values)) is None:
        _block_type_plainly(self, element, shape)  # which checks it
        known = _shapes[values] = (self.shape, self.numel, str(self.shape))
    self.element_ty = element
    self.shape, self.numel, name = known
    self.name = f"<{name}, {element}>"


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    values = tuple(type.shape.values) if type.is_block() else ()
    if (known := _tensor_shapes.get(values)) is None:
        _tensor_plainly(self, handle, type)
        known = _tensor_shapes[values] = (self.shape, self.numel)
    self.shape, self.numel = known


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The interpreter makes a table of all types for every question."""
    scalar = dtype.scalar
    if (known := _numpy_dtypes.get(scalar.name)) is None:
        known = _numpy_dtypes[scalar.name] = _numpy_dtype_plainly(scalar)
    return known


def _operands(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """Tensors of the same type and shape as they are, and a number beside a tensor as one of those
    at once; of types in which nothing is computed in another."""
    if not kwargs and (len(args) < 3 or args[2]):
        if type(lhs) is tl.tensor:
            if type(rhs) is tl.tensor:
                if lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and lhs.dtype.name in _RANGES:
                    return lhs, rhs
            elif _is_of_type(rhs, lhs.dtype):
                return lhs, _number_like(rhs, lhs)
        elif type(rhs) is tl.tensor and _is_of_type(lhs, rhs.dtype):
            return _number_like(lhs, rhs), rhs
    return _operands_plainly(self, lhs, rhs, *args, **kwargs)


def _is_of_type(number: Any, dtype: Any) -> bool:
    if (known := _RANGES.get(dtype.name)) is None:
        return False
    if known == 0:
        return type(number) in (int, float)
    return type(number) is int and -known <= number < known


def _handle(self: Any, data: np.ndarray, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > _BYTES.get(dtype.name, 0):
        self.__post_init__()  # which checks it


def _tensor_like(data: np.ndarray, like: Any) -> Any:
    found = tl.tensor.__new__(tl.tensor)
    found.handle = interpreter.TensorHandle(data, like.handle.dtype)
    found.type, found.dtype = like.type, like.dtype
    found.shape, found.numel = like.shape, like.numel
    return found


def _compared(data: np.ndarray, like: Any) -> Any:
    shape = tuple(like.type.shape.values) if like.type.is_block() else ()
    if (known := _bool_types.get(shape)) is None:
        known = tl.block_type(tl.int1, list(shape)) if shape else tl.int1
        _bool_types[shape] = known
    return tl.tensor(interpreter.TensorHandle(data, like.dtype), known)


def _at_once(compute: Any, plainly: Any, make: Callable[[np.ndarray, Any], Any]) -> Any:
    """An operation on numbers of one type, which numpy broadcasts as the language does where one of
    both is no block, without the half dozen of calls and tensors in between."""

    def operate(self: Any, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if type(lhs) is tl.tensor:
            if type(rhs) is tl.tensor:
                if lhs.dtype is rhs.dtype and lhs.dtype.name in _RANGES:
                    if lhs.shape is rhs.shape or not rhs.type.is_block():
                        return make(compute(lhs.handle.data, rhs.handle.data), lhs)
                    if not lhs.type.is_block():
                        return make(compute(lhs.handle.data, rhs.handle.data), rhs)
            elif _is_of_type(rhs, lhs.dtype):
                return make(compute(lhs.handle.data, rhs), lhs)
        elif type(rhs) is tl.tensor and _is_of_type(lhs, rhs.dtype):
            return make(compute(lhs, rhs.handle.data), rhs)
        return plainly(self, lhs, rhs, *args, **options)

    return operate


def _with_offsets(plainly: Any) -> Any:
    """Addition of pointers and offsets, of which one is no block or both have the same shape."""

    def add(self: Any, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype.is_ptr():
            width = lhs.dtype.element_ty.primitive_bitwidth // 8 if rhs.dtype.name in _RANGES else 0
            if width and rhs.dtype.is_int():
                data = lhs.handle.data + width * rhs.handle.data.astype(np.uint64)
                if lhs.shape is rhs.shape or not rhs.type.is_block():
                    return _tensor_like(data, lhs)
                if not lhs.type.is_block():
                    handle = interpreter.TensorHandle(data, lhs.handle.dtype)
                    return tl.tensor(handle, tl.block_type(lhs.dtype, rhs.type.shape))
        return plainly(self, lhs, rhs, *args, **options)

    return add


def _of_bits(compute: Any, plainly: Any) -> Any:
    """And, or, and exclusive or, of masks and of integers of one type."""

    def operate(self: Any, lhs: Any, rhs: Any) -> Any:
        if type(lhs) is tl.tensor and lhs.dtype.name in _INTEGERS:
            if type(rhs) is tl.tensor:
                if lhs.dtype is rhs.dtype and lhs.handle.data.dtype is rhs.handle.data.dtype:
                    if lhs.shape is rhs.shape or not rhs.type.is_block():
                        return _tensor_like(compute(lhs.handle.data, rhs.handle.data), lhs)
                    if not lhs.type.is_block():
                        return _tensor_like(compute(lhs.handle.data, rhs.handle.data), rhs)
            elif _is_of_type(rhs, lhs.dtype):
                return _tensor_like(compute(lhs.handle.data, rhs), lhs)
        return plainly(self, lhs, rhs)

    return operate


def _cast(self: Any, source: Any, dtype: Any, rounding: Any = None) -> Any:
    target = dtype.scalar
    if rounding is None and (source.dtype.name, target.name) in _CASTS:
        handle = interpreter.TensorHandle(source.handle.data.astype(_numpy_dtype(target)), target)
        is_block = source.type.is_block()
        return tl.tensor(handle, source.type.with_element_ty(target) if is_block else target)
    return _cast_plainly(self, source, dtype, rounding)


def _unwrapped(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind is tl.tensor or kind is int else _unwrapped_plainly(value)


def _number_like(number: float, tensor: Any) -> Any:
    data = np.full(tensor.handle.data.shape, number, _numpy_dtype(tensor.dtype))
    return tl.tensor(interpreter.TensorHandle(data, tensor.dtype), tensor.type)


def _common_type(self: Any, one: Any, one_is_scalar: bool, other: Any, *args: bool) -> Any:
    """What only the operands' types say is worked out once."""
    key = one.name, one_is_scalar, other.name, *args
    if (known := _common_types.get(key)) is None:
        known = _common_type_plainly(self, one, one_is_scalar, other, *args)
        _common_types[key] = known
    return known


def _members(package: Any) -> Any:
    """Of the language, whose functions are found and looked at once."""
    if (known := _builtins.get(id(package))) is None:
        found = inspect.getmembers(package)
        at_once = _operators() if package is tl.tensor else {}
        known = [
            (name, at_once.get(name) or _interpreted(f))
            for name, f in found
            if tl.core.is_builtin(f)
        ]
        _builtins[id(package)] = known
    return known


def _operators() -> dict[str, Any]:
    """Of tensors: at once what the language does for them, without the functions in between."""
    found: dict[str, Any] = {}

    def add(operator: str, name: str, *options: bool) -> None:
        compute, semantic = getattr(TritonSemantic, name), interpreter.interpreter_semantic

        def operate(self: Any, other: Any, _semantic: Any = None) -> Any:
            return compute(semantic, self, _unwrapped(other), *options)

        def reflected(self: Any, other: Any, _semantic: Any = None) -> Any:
            return compute(semantic, _unwrapped(other), self, *options)

        found[f"__{operator}__"], found[f"__r{operator}__"] = operate, reflected

    for operator in ("add", "sub", "mul"):
        add(operator, operator, True)
    for operator in ("and", "or", "xor"):
        add(operator, f"{operator}_")
    for operator, name in _COMPARISONS.items():
        add(operator, name)
    return found


def _interpreted(member: Any) -> Any:
    """A function of the language, without what asks whether a kernel calls it."""
    is_asking = getattr(member, "__code__", None) is _ASKING
    function = member.__wrapped__ if is_asking else member
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=semantic, **kwargs)

    return call


def _patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _members(package):
        scope.set_attr(package, name, member)


def _check_overflow(self: Any, *args: Any) -> None:
    """Whether integers overflow: the interpreter computes it, in eight operations for each of
    them, and then asserts nothing, since it is not in debug mode."""
    if self.builder.options.debug:
        _check_overflow_plainly(self, *args)


def _torch_dtype(dtype: Any) -> torch.dtype:
    by_name = {"fp8e4nv": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return getattr(torch, by_name[dtype.name])


if interpreter is not None and os.environ.get("TRITON_INTERPRET") == "1":
    _launch_plainly = interpreter.GridExecutor.__call__
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.GridExecutor.__call__ = _launch
    _convert_float_plainly = interpreter._convert_float
    interpreter._convert_float = _convert_float
    _broadcast_plainly = TritonSemantic.broadcast_impl_value
    TritonSemantic.broadcast_impl_value = _broadcast
    _equal_dtypes_plainly = tl.dtype.__eq__
    tl.dtype.__eq__ = _equal_dtypes
    _block_type_plainly = tl.block_type.__init__
    tl.block_type.__init__ = _block_type
    _tensor_plainly = tl.tensor.__init__
    tl.tensor.__init__ = _tensor
    _numpy_dtype_plainly = interpreter._get_np_dtype
    interpreter._get_np_dtype = _numpy_dtype
    _check_overflow_plainly = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    _operands_plainly = TritonSemantic.binary_op_type_checking_impl
    TritonSemantic.binary_op_type_checking_impl = _operands
    _common_type_plainly = TritonSemantic.computation_type_impl
    TritonSemantic.computation_type_impl = _common_type
    interpreter._patch_builtin = _patch_builtins
    _ASKING = tl.core.add.__code__
    interpreter.TensorHandle.__init__ = _handle
    _cast_plainly = TritonSemantic.cast
    TritonSemantic.cast = _cast
    _unwrapped_plainly = tl.core._unwrap_if_constexpr
    tl.core._unwrap_if_constexpr = _unwrapped
    for name, compute in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        plainly = getattr(TritonSemantic, name)
        setattr(TritonSemantic, name, _at_once(compute, plainly, _tensor_like))
    TritonSemantic.add = _with_offsets(TritonSemantic.add)
    for operator, name in _COMPARISONS.items():
        plainly, compute = getattr(TritonSemantic, name), getattr(operators, operator)
        setattr(TritonSemantic, name, _at_once(compute, plainly, _compared))
    for operator in ("and_", "or_", "xor"):
        name = operator.rstrip("_") + "_"
        plainly, compute = getattr(TritonSemantic, name), getattr(operators, operator)
        setattr(TritonSemantic, name, _of_bits(compute, plainly))
