"""How call sites are read, under whatever interpreter runs this: callsite_checks.py CALLSITE.py.

Needs nothing but the standard library, so that interpreters without torch can run it.
"""

import functools
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("callsite", sys.argv[1])
callsite = sys.modules["callsite"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(callsite)


def dropout(x, p=0.5, training=True, inplace=False, *, note=None):
    """Hands itself over as torch's functions do: the tensor by position, the rest by name."""
    names = {"p": p, "training": training, "inplace": inplace, "note": note}
    return callsite.written_arguments(dropout, sys._getframe(), (x,), names)


def forwarder(*args, **kwargs):
    return callsite.written_arguments(forwarder, sys._getframe(), (), {"something": "else"})


class Holder:
    call = staticmethod(dropout)


def run(source):
    return eval(source, {"dropout": dropout, "forwarder": forwarder, "Holder": Holder, "one": (1,)})


CALLS = {
    "dropout(1)": ((1,), {}),
    "dropout(1, 0.5)": ((1, 0.5), {}),  # written, although it is the default
    "dropout(1, 0.25)": ((1, 0.25), {}),
    "dropout(1, p=0.5)": ((1,), {"p": 0.5}),
    "dropout(1, inplace=False, p=0.1)": ((1,), {"inplace": False, "p": 0.1}),
    "dropout(1, 0.1, True, note='n')": ((1, 0.1, True), {"note": "n"}),
    "dropout(x=1)": ((), {"x": 1}),
    "dropout(p=0.1, x=1)": ((), {"p": 0.1, "x": 1}),
    "Holder.call(1, training=True)": ((1,), {"training": True}),
    "Holder().call(1, 0.1)": ((1, 0.1), {}),
    "(lambda y: dropout(y, p=y))(3)": ((3,), {"p": 3}),
    "[dropout(y, 0.5) for y in one][0]": ((1, 0.5), {}),
    "dropout(len([1]), max(0.1, 0.2))": ((1, 0.2), {}),
    # What the instruction does not say: arguments equal to their defaults are taken as left out.
    "dropout(*one)": ((1,), {}),
    "dropout(*one, p=0.5)": ((1,), {}),
    "dropout(*one, p=0.1)": ((1,), {"p": 0.1}),
    "dropout(1, **{'training': False})": ((1,), {"training": False}),
    "list(map(dropout, one))[0]": ((1,), {}),
    "forwarder(1, 2, a=3)": ((1, 2), {"a": 3}),
    "forwarder(*one, **{'b': 2})": ((1,), {"b": 2}),
}

for source, expected in CALLS.items():
    found = run(source)
    assert found == expected, f"{source}: {found}"
    args, kwargs = found
    assert list(kwargs) == list(expected[1]), f"{source}: order {list(kwargs)}"

# A call so far into a function that its instructions need extended arguments.
many = ", ".join(f"'text {n}'" for n in range(400))
scope = {"dropout": dropout, "seen": []}
body = (
    f"def far(a):\n    seen.append([a, {many}])\n    return dropout(a, training=False, p='late')\n"
)
exec(body, scope)
assert scope["far"](1) == ((1,), {"training": False, "p": "late"}), scope["far"](1)
for _ in range(200):  # also when the interpreter has specialised the instructions
    assert scope["far"](1) == ((1,), {"training": False, "p": "late"})

# Several calls in one line are told apart.
pair = run("(dropout(1, 0.5), dropout(2, p=0.5))")
assert pair == (((1, 0.5), {}), ((2,), {"p": 0.5})), pair

# A call from C with arguments bound before: the values are right, whatever their form.
args, kwargs = functools.partial(dropout, p=0.1)(1)
assert dict(zip(("x", "p"), args, strict=False)) | kwargs == {"x": 1, "p": 0.1}, (args, kwargs)


def outer():
    return inner()


def inner():
    found = [callsite.own_frame(f, sys._getframe()) for f in (inner, outer, dropout)]
    return [frame and frame.f_code.co_name for frame in found]


assert outer() == ["inner", "outer", None]
print("all calls read")
