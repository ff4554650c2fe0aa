"""Reading a running function's values keeps none alive and changes none, on each Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.drivers.kernel import ROOT
from tests.matrix import UV

PROGRAM = """
import json, runpy, sys, weakref

locals_of = runpy.run_path(sys.argv[1])["locals_of"]

class Thing:
    pass

def read(depth=1):
    return sorted(locals_of(sys._getframe(depth)))

def in_a_loop():
    refs = []
    for _ in range(3):
        a = Thing()
        refs.append(weakref.ref(a))
        assert locals_of(sys._getframe())["a"] is a
        del a
    return [ref() is None for ref in refs]

def of_a_cell():
    a = Thing()
    ref = weakref.ref(a)
    def inner():
        assert locals_of(sys._getframe(1))["a"] is a
        assert locals_of(sys._getframe())["a"] is a
    inner()
    assert isinstance(a, Thing)
    del a
    return [ref() is None]

def of_a_comprehension():
    a = Thing()
    ref = weakref.ref(a)
    assert all("a" in read(2) for _ in range(2))
    del a
    return [ref() is None]

def in_a_generator():
    a = Thing()
    ref = weakref.ref(a)
    yield "a" in read()
    del a
    yield ref() is None

def with_locals_held():
    mine = locals()
    a = 1
    read()
    return ["a" in mine or sys.version_info >= (3, 13), a == 1]

def below_a_debugger():
    a, b = 1, 2
    def trace(frame, event, value):
        frame.f_trace = trace
        locals_of(frame)
        return trace
    before = sys.gettrace()
    sys._getframe().f_trace = trace
    sys.settrace(trace)
    b = a + 1
    read()
    sys.settrace(before)
    return [a == 1, b == 2]

class Body:
    a = 1
    read()
    kept = a == 1

at_top = Thing()
found = {
    "in a loop": in_a_loop(),
    "of a cell": of_a_cell(),
    "of a comprehension": of_a_comprehension(),
    "in a generator": list(in_a_generator()),
    "with locals() held": with_locals_held(),
    "below a debugger": below_a_debugger(),
    "in a class": [Body.kept, Body.a == 1],
    "at the top": ["at_top" in read(), isinstance(at_top, Thing)],
}
print(json.dumps(found))
"""


def test_each_python(starts_processes: None, tmp_path: Path) -> None:
    tried = []
    for version in ("3.10", "3.11", "3.12", "3.13"):
        find = [UV, "python", "find", "--no-python-downloads", "--no-project", version]
        python = subprocess.run(find, capture_output=True, text=True)
        if python.returncode:
            continue
        module = ROOT / "tpunb/utils/frame_locals.py"
        command = [python.stdout.strip(), "-c", PROGRAM, str(module)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        assert {name for name, good in found.items() if not all(good)} == set(), version
        tried.append(version)
    assert "{}.{}".format(*sys.version_info) in tried
