"""Marks of the kernel's values: the marks of a value differ if it was changed in between.

A mark is the hash of a pickle of what a value consists of. What that is is decided here, so that
no code of a user's class runs: attributes are read past its properties, containers past its
methods. Large arrays and tables are sampled; tensors have a version of their own. What cannot be
looked into, such as a generator or a lock, is marked by its identity.

Nothing is imported: a library that is not loaded has made no value.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import types
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from tpunb.backends.xla.private_names import TENSOR_VERSION
from tpunb.utils.modules import is_own_module, loaded, own_attributes

MOST_BYTES = 1 << 20
"""The size of a pickle up to which a value is read as a whole. Long texts and arrays, which take
little time for each byte, count an eighth."""
_LONG = 1 << 17
"""Pickles are written in frames that are shorter, and long texts and arrays apart from them."""
MOST_OBJECTS = 20_000
"""The most objects of classes, in contrast to numbers, texts and containers, in one pickle."""
WHOLE_ARRAY = 4 << 20
"""Bytes of an array up to which it is read as a whole."""
WHOLE_TENSOR = 1 << 12
"""Bytes of a tensor up to which it is read as a whole; a larger one is known by its version."""
WHOLE_TABLE = 100_000
"""Fields of a pandas table up to which it is read as a whole."""
SAMPLES = 1024
"""Items of a larger array, table or container that are read."""

_PICKLED = frozenset("array datetime decimal fractions ipaddress re uuid zoneinfo".split())
"""Modules of the standard library whose values are pickled as they are."""
_PLAIN = (range, slice, complex, type(...), type(NotImplemented))
_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes))
_CODE = "co_code co_names co_varnames co_freevars co_cellvars co_argcount co_kwonlyargcount".split()
_NOT_OF_CLASS = frozenset(
    "__dict__ __weakref__ __doc__ __annotations__ __abstractmethods__ _abc_impl __slotnames__ "
    "__dataclass_fields__ __dataclass_params__ __firstlineno__ __static_attributes__".split()
)


@dataclass(frozen=True)
class ValueMark:
    """What a value was like at one time."""

    hash: bytes
    exact: bool
    """True if equal hashes mean equal values, also of another object; False if the hash is of an
    identity, or of samples."""
    identity: int
    """The value's `id`; 0 for numbers and texts, which are equal or not."""


def mark(value: object) -> ValueMark:
    """Return the mark of a value. Takes 0.2 s at most, and runs no code of a user's class."""
    kind = type(value)
    simple = type(kind) is type and kind in _IMMUTABLE
    if simple and (not isinstance(value, str | bytes) or len(value) < _LONG):
        return ValueMark(f"{kind.__name__} {value!r}".encode(), exact=True, identity=0)
    into = _Hash()
    if (exact := _pickle(value, into)) is None:
        into = _Hash()
        into.update(repr((type.__getattribute__(kind, "__name__"), id(value))).encode())
        for part in _sample(value, kind):
            if _pickle(part, each := _Hash()) is None:
                each.update(str(id(part)).encode())
            into.update(each.digest())
    return ValueMark(into.digest(), bool(exact), 0 if simple else id(value))


def _pickle(value: object, into: _Hash) -> bool | None:
    """Hash a value; True if the hash is exact, None if the value is too large or too deep."""
    pickler = _Pickler(into)
    try:
        pickler.dump(value)
    except (_TooLargeError, RecursionError):
        return None
    except Exception:  # values of libraries may refuse to be read, each with an error of its own
        return None
    return pickler.exact


def _sample(value: Any, kind: type) -> Iterator[object]:
    """Yield what is compared of a value that is too large: which items it has, and some of them."""
    if any(kind is known for known in (list, tuple, dict, set, frozenset)):
        # Copied at once: another thread may change the value.
        items = [list(value)] if kind is not dict else [list(value), list(value.values())]
        yield len(value)
        for each in items:
            yield array("Q", map(id, each)).tobytes()
            yield from islice(each, 0, None, max(1, len(value) // SAMPLES))


class _TooLargeError(Exception):
    """The value is too large to be read as a whole."""


class _Hash(io.RawIOBase):
    """A file that only hashes what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._left = MOST_BYTES
        self.update, self.digest = self._hash.update, self._hash.digest

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._left -= size if size < _LONG else size // 8
        if self._left < 0:
            raise _TooLargeError
        self._hash.update(data)
        return size


_Parts = tuple[object, ...]


class _Pickler(pickle.Pickler):
    """Pickles what values consist of. Builtin containers are read in C."""

    def __init__(self, into: _Hash) -> None:
        super().__init__(into, protocol=5)
        self.exact = True
        self._left = MOST_OBJECTS
        self._tensors = loaded("torch", "Tensor"), loaded("torch", "nn.Parameter")
        self._known: dict[type, Callable[[_Pickler, Any], _Parts] | None] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return what is pickled for a value that is neither number, text nor container."""
        if value is tuple:  # the function below
            return NotImplemented
        self._left -= 1
        if self._left < 0:
            raise _TooLargeError
        kind = type(value)
        if kind is self._tensors[0] or kind is self._tensors[1]:
            return tuple, (), _tensor(self, value)
        describe: Callable[[_Pickler, Any], _Parts] | None
        if type(kind) is not type:  # comparing such classes may run code of a metaclass
            describe = _class if issubclass(kind, type) else _object
        elif kind in self._known:
            describe = self._known[kind]
        else:
            describe = self._known[kind] = _describer(kind)
        # As the state of an object: what contains itself is remembered before it is read.
        return NotImplemented if describe is None else (tuple, (), describe(self, value))


def _identity(pickler: _Pickler, value: object) -> _Parts:
    pickler.exact = False
    return ("object", type.__getattribute__(type(value), "__qualname__"), id(value))


def _module_of(kind: type) -> str:
    name = type.__getattribute__(kind, "__module__")
    return name if type(name) is str else ""


# Functions, classes and modules: those of libraries by their names


def _function(pickler: _Pickler, value: types.FunctionType) -> _Parts:
    if not is_own_module(value.__globals__.get("__name__")):
        return ("function", value.__module__, value.__qualname__)
    cells = tuple(_inside(cell) for cell in value.__closure__ or ())
    own = (value.__code__, value.__defaults__, value.__kwdefaults__, cells, value.__dict__)
    return ("function", *own)


def _inside(cell: types.CellType) -> object:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def _code(pickler: _Pickler, value: types.CodeType) -> _Parts:
    return ("code", value.co_consts, *(getattr(value, name) for name in _CODE))


def _named(pickler: _Pickler, value: Any) -> _Parts:
    return ("name", str(value.__module__), value.__qualname__)


def _descriptor(pickler: _Pickler, value: Any) -> _Parts:
    return ("descriptor", value.__name__)


def _class(pickler: _Pickler, value: Any) -> _Parts:
    read = type.__getattribute__
    module, name = read(value, "__module__"), read(value, "__qualname__")
    if not is_own_module(module):
        return ("class", str(module), name)
    own = read(value, "__dict__").items()
    attributes = tuple(item for item in own if item[0] not in _NOT_OF_CLASS)
    return ("class", module, name, read(value, "__mro__")[1:], attributes)


def _module(pickler: _Pickler, value: types.ModuleType) -> _Parts:
    name = value.__dict__.get("__name__")
    if name == "__main__" or not is_own_module(name):
        return ("module", str(name))
    names = value.__dict__.items()
    return ("module", name, tuple(item for item in names if not item[0].startswith("__")))


def _method(pickler: _Pickler, value: types.MethodType) -> _Parts:
    return ("method", value.__func__, value.__self__)


def _builtin(pickler: _Pickler, value: Any) -> _Parts:
    owner = value.__self__
    if owner is None or type(owner) is types.ModuleType:
        return _named(pickler, value)
    return ("method", value.__qualname__, owner)


# Values of libraries


def _path(pickler: _Pickler, value: PurePath) -> _Parts:
    return ("path", str(value))


def _text(pickler: _Pickler, value: object) -> _Parts:
    return ("text", str(value))


def _repr(pickler: _Pickler, value: object) -> _Parts:
    return ("text", repr(value))


def _array(pickler: _Pickler, value: Any) -> _Parts:
    base = loaded("numpy", "ndarray")
    value = base.view(value, base) if type(value) is not base else value
    kind = value.dtype
    described = ("array", value.shape, repr(kind))
    if kind.hasobject:
        return (*described, value.tolist())
    if value.nbytes <= WHOLE_ARRAY:
        return (*described, value.tobytes())
    pickler.exact = False
    places = [at * (value.size - 1) // (SAMPLES - 1) for at in range(SAMPLES)]
    return (*described, value.__array_interface__["data"][0], value.flat[places].tobytes())


def _scalar(pickler: _Pickler, value: Any) -> _Parts:
    return ("scalar", value.dtype.str, value.tobytes())


def _tensor(pickler: _Pickler, value: Any) -> _Parts:
    torch = sys.modules["torch"]
    kind = type(value).__qualname__
    described: _Parts = (
        kind,
        str(value.dtype),
        tuple(value.shape),
        value.requires_grad,
        str(value.device),
    )
    whole = value.numel() * value.element_size() <= WHOLE_TENSOR
    if value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized:
        if whole:
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            return (*described, flat.numpy().tobytes())
        if value.is_contiguous():
            flat = value.detach().view(-1)[:: value.numel() // 64 or 1].contiguous()
            described = (*described, value.data_ptr(), flat.view(torch.uint8).numpy().tobytes())
    return (*described, *_version(pickler, value))


def _version(pickler: _Pickler, value: Any) -> _Parts:
    """Changes with each change in place, also where reading the values would cost a program."""
    version = None if value.is_inference() else getattr(value, TENSOR_VERSION)
    return (*_identity(pickler, value), version)


def _table(pickler: _Pickler, value: Any) -> _Parts:
    frame = value.to_frame() if value.ndim == 1 else value
    if frame.size > WHOLE_TABLE:
        pickler.exact = False
        rows = max(1, min(SAMPLES, WHOLE_TABLE // max(1, frame.shape[1])))
        frame = frame.iloc[:: max(1, len(frame) // rows)]
    columns = tuple(frame.iloc[:, at].to_numpy() for at in range(frame.shape[1]))
    types_ = tuple(map(str, frame.dtypes))
    return ("table", value.shape, types_, columns, frame.columns, frame.index)


def _index(pickler: _Pickler, value: Any) -> _Parts:
    if len(value) > WHOLE_TABLE:
        pickler.exact = False
        value = value[:: len(value) // SAMPLES]
    return ("index", str(value.dtype), tuple(value.names), value.to_numpy())


def _describer(kind: type) -> Callable[[_Pickler, Any], _Parts] | None:
    """Return how values of a class are described; None if they are pickled as they are."""
    module = _module_of(kind)
    if kind in _PLAIN or module in _PICKLED:
        return None
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    if not is_own_module(module):
        for library, name, describe in _OF_LIBRARIES:
            if (base := loaded(library, name)) is not None and issubclass(kind, base):
                return describe
    return _class if issubclass(kind, type) else _object


_OF_LIBRARIES: tuple[tuple[str, str, Callable[[_Pickler, Any], _Parts]], ...] = (
    ("numpy", "ndarray", _array),
    ("numpy", "generic", _scalar),
    ("numpy", "dtype", _text),
    ("torch", "device", _text),
    ("torch", "dtype", _text),
    ("torch", "layout", _text),
    ("pandas", "DataFrame", _table),
    ("pandas", "Series", _table),
    ("pandas", "Index", _index),
    ("pandas", "Timestamp", _repr),
    ("pandas", "Timedelta", _repr),
    ("pandas", "Period", _repr),
    ("pandas", "Interval", _repr),
    ("pandas", "api.extensions.ExtensionDtype", _text),
)
_CONTAINERS: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (str, lambda value: str.__str__(value)),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (bytearray, lambda value: bytes(memoryview(value))),
    (int, lambda value: int.__index__(value)),
    (float, lambda value: float.__float__(value)),
    (dict, lambda value: [*dict.items(value)]),
    (list, lambda value: [*list.__iter__(value)]),
    (tuple, lambda value: tuple.__getitem__(value, slice(None))),
    (set, lambda value: [*set.__iter__(value)]),
    (frozenset, lambda value: [*frozenset.__iter__(value)]),
    (deque, lambda value: [*deque.__iter__(value)]),
)
"""For subclasses of these, what they contain as numbers and containers, past their own methods."""


def _object(pickler: _Pickler, value: Any) -> _Parts:
    """Describe an object by what it contains and by its attributes."""
    kind = type(value)
    tensor = loaded("torch", "Tensor")
    if tensor is not None and issubclass(kind, tensor):
        # Each use of a tensor of a user's class runs its code.
        return (_identity if is_own_module(_module_of(kind)) else _version)(pickler, value)
    inside = tuple(read(value) for base, read in _CONTAINERS if issubclass(kind, base))
    if issubclass(kind, defaultdict):
        inside += (vars(defaultdict)["default_factory"].__get__(value),)
    found = own_attributes(value)
    attributes: object = found
    slots: _Parts = tuple(_slots(value))
    if found is None and not slots and not inside:
        return _identity(pickler, value)
    if not is_own_module(_module_of(kind)):
        torch_module = loaded("torch", "nn.Module")
        if torch_module is None or not issubclass(kind, torch_module):
            if found or slots:  # a library's own attributes may be caches
                pickler.exact = False
                slots = (id(value), *(s for s in _slots(value) if not s[0].startswith("_")))
            attributes = tuple(
                item for item in (found or {}).items() if not str(item[0]).startswith("_")
            )
    return ("object", kind, inside, attributes, slots)


def _slots(value: object) -> Iterator[tuple[str, object]]:
    for base in type.__getattribute__(type(value), "__mro__"):
        own = type.__getattribute__(base, "__dict__")
        if "__slots__" not in own:
            continue
        for name, attribute in own.items():
            if type(attribute) is types.MemberDescriptorType:
                try:
                    yield name, attribute.__get__(value)
                except AttributeError:  # not set
                    continue


_BY_KIND: dict[type, Callable[[_Pickler, Any], _Parts]] = {
    types.FunctionType: _function,
    types.BuiltinFunctionType: _builtin,
    types.MethodType: _method,
    types.CodeType: _code,
    types.ModuleType: _module,
    types.WrapperDescriptorType: _descriptor,
    types.MethodDescriptorType: _descriptor,
    types.ClassMethodDescriptorType: _descriptor,
    types.GetSetDescriptorType: _descriptor,
    types.MemberDescriptorType: _descriptor,
    property: lambda _, value: ("property", value.fget, value.fset, value.fdel),
    staticmethod: lambda _, value: ("staticmethod", value.__func__),
    classmethod: lambda _, value: ("classmethod", value.__func__),
    partial: lambda _, value: ("partial", value.func, value.args, value.keywords),
    types.SimpleNamespace: lambda _, value: ("namespace", value.__dict__),
    OrderedDict: lambda _, value: ("ordered", [*value.items()]),
    type(PurePath()): _path,
    type(Path()): _path,
}
