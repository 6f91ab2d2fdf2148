"""What differs between two dump trees: the reference first, ours second.

Max and Min are equal; Mean and Norm may differ by the rounding of the tensor's own type, in which
the reference was summed. Where that overflowed, a finite number beyond its range is right. A
backward record may stand below the module that encloses its forward although the reference has it
elsewhere.
"""

import json
import math
import re
from pathlib import Path

EPSILON = {"torch.bfloat16": 2.0**-7, "torch.float16": 2.0**-10}
LARGEST = {"torch.float16": 65504.0}
NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def differences(reference, ours):
    """One line for each difference: `step0/rank1/dump.json: Functional.relu.0.forward...`.

    Folders proc{pid} are numbered in the order of their pids: proc0, proc1.
    """
    left, right = _folders(Path(reference)), _folders(Path(ours))
    assert left, f"no step folders in {reference}"
    lines = list(_keys(left, right, "folder"))
    for name in left.keys() & right.keys():
        files, others = (
            {path.name: path for path in folder.iterdir()} for folder in (left[name], right[name])
        )
        lines += _keys(files, others, name)
        for file in sorted(files.keys() & others.keys()):
            compare = _COMPARE.get(file, _document)
            a, b = (json.loads(x[file].read_text()) for x in (files, others))
            lines += [f"{name}/{file}: {line}" for line in compare(a, b)]
    return sorted(lines)


def unexplained(lines, known_file):
    """The lines that no pattern of a `.known` file covers."""
    known = Path(known_file)
    text = known.read_text().splitlines() if known.exists() else []
    patterns = [line for line in text if line and not line.startswith("#")]
    return [line for line in lines if not any(re.search(p, line) for p in patterns)]


def _folders(root):
    found = {}
    for step in sorted(root.glob("step*")):
        ranks = sorted(step.iterdir(), key=lambda p: (len(p.name), p.name))
        processes = [p.name for p in ranks if re.fullmatch(r"proc\d+", p.name)]
        for rank in ranks:
            is_process = rank.name in processes
            name = f"proc{processes.index(rank.name)}" if is_process else rank.name
            found[f"{step.name}/{name}"] = rank
    return found


def _keys(a, b, where):
    yield from (f"{where}: {key} only in the reference" for key in a if key not in b)
    yield from (f"{where}: {key} only in ours" for key in b if key not in a)


def _named(a, b):
    """Records or tree entries: the same names in the same order, equal values."""
    for name in a:
        if name in b:
            yield from _value(a[name], b[name], name)
        else:
            yield f"{name} only in the reference"
    yield from (f"{name} only in ours" for name in b if name not in a)
    common, other = [n for n in a if n in b], [n for n in b if n in a]
    for x, y in zip(common, other, strict=True):
        if x != y:
            yield f"{y} stands where the reference has {x}"
            return


def _document(a, b):
    if list(a) != list(b):
        yield f"header {list(a)} != {list(b)}"
    heads = [{k: v for k, v in x.items() if k not in ("data", "dump_data_dir")} for x in (a, b)]
    yield from _value(*heads, "header")
    yield from _named(a["data"], b["data"])


def _tree(a, b):
    def settled(name, parent):
        ours = b.get(name, parent)
        enclosing = _mirrored(a, name) if "backward" in name else None
        return ours if ours == enclosing else parent

    yield from _named({name: settled(name, parent) for name, parent in a.items()}, b)


def _mirrored(tree, backward):
    """The backward record of the module that encloses this record's forward."""
    if backward.startswith("Module."):
        forward = backward.replace(".backward.", ".forward.")
    else:
        forward = re.sub(r"\.backward$", ".forward", backward)
    parent = tree.get(forward)
    return parent.replace(".forward.", ".backward.") if parent else None


def _groups(a, b):
    """Which records share a stack; not its text, which holds paths."""
    left, right = ({json.dumps(sorted(names)) for names, _ in x.values()} for x in (a, b))
    yield from (f"group {names} only in the reference" for names in sorted(left - right))
    yield from (f"group {names} only in ours" for names in sorted(right - left))


def _value(a, b, path):
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            yield f"{path}: keys {list(a)} != {list(b)}"
        for key in a.keys() & b.keys():
            if "dtype" in a and key in ("Mean", "Norm"):
                if not _close(key, _number(a[key]), _number(b[key]), a):
                    yield f"{path}.{key}: {a[key]!r} != {b[key]!r}"
            else:
                yield from _value(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            yield f"{path}: length {len(a)} != {len(b)}"
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _value(x, y, f"{path}.{index}")
    elif not _same(_number(a), _number(b)):
        yield f"{path}: {a!r} != {b!r}"


def _number(value):
    """Numbers that strict JSON writes as words."""
    return NUMBERS.get(value, value) if isinstance(value, str) else value


def _same(a, b):
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or (type(a) is type(b) and a == b)


def _close(key, a, b, entry):
    if _same(a, b) or a is None or b is None:
        return _same(a, b)
    dtype = entry["dtype"]
    if not math.isfinite(a):
        return math.isfinite(b) and abs(b) * 1.001 >= LARGEST.get(dtype, 3.3e38)
    scale = max(abs(a), abs(b))
    norm = _number(entry["Norm"])
    if key == "Mean" and norm is not None and math.isfinite(norm):
        # Sums cancel: the error is that of the elements, not of the mean.
        scale = max(scale, norm / math.sqrt(max(1, math.prod(entry["shape"]))))
    return abs(a - b) <= max(2e-6, EPSILON.get(dtype, 0.0)) * scale


_COMPARE = {"construct.json": _tree, "stack.json": _groups}
