"""What is known about operations by their names."""

import re

#: Their result is what stood in memory before: it means nothing.
UNINITIALIZED = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
}
#: Their first argument is overwritten without being read.
OVERWRITES = {
    "zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "log_normal_", "geometric_", "cauchy_", "set_", "trunc_normal_",
}  # fmt: skip
#: They fill or combine masks, where -inf is meant.
MASKING = {
    "masked_fill", "masked_fill_", "where", "tril", "triu", "tril_", "triu_", "full", "full_like",
    "new_full", "fill_", "__setitem__", "logical_not", "logical_and", "logical_or", "__and__",
    "__or__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "index_fill", "tensor",
    "masked_scatter", "bitwise_not", "__invert__", "log", "ones_like", "zeros_like",
}  # fmt: skip
#: Their result is the same on every machine: they move, choose or round once.
EXACT = {
    "embedding", "reshape", "view", "transpose", "permute", "cat", "concat", "stack", "split",
    "chunk", "expand", "repeat", "index_select", "gather", "masked_fill", "masked_fill_", "where",
    "relu", "relu_", "max_pool1d", "max_pool2d", "max_pool3d", "clone", "contiguous", "squeeze",
    "unsqueeze", "flatten", "add", "add_", "sub", "sub_", "mul", "mul_", "__add__", "__radd__",
    "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__", "neg", "abs",
    "max", "min", "clamp", "__getitem__", "to", "detach", "dropout", "t", "pad", "unbind", "roll",
}  # fmt: skip
EXACT_CLASSES = {
    "Embedding", "ReLU", "Identity", "Dropout", "Flatten", "MaxPool1d", "MaxPool2d", "MaxPool3d",
}  # fmt: skip
#: Sums and differences: what cancels in them leaves the rounding of the operands.
CANCELLING = {
    "add", "add_", "sub", "sub_", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__",
    "__isub__", "sum", "mean", "cat", "stack", "lerp", "lerp_",
}  # fmt: skip
RANDOM = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "rand", "randn", "rand_like", "randn_like", "randint", "randperm", "normal", "bernoulli",
    "multinomial", "rrelu", "gumbel_softmax", "normal_", "uniform_", "bernoulli_",
}  # fmt: skip
#: They move or cast values without computing: one more or less of them is no divergence.
KEEPS_VALUES = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "clone", "cpu",
    "cuda", "npu", "contiguous", "detach", "reshape", "view", "view_as", "reshape_as", "flatten",
    "squeeze", "unsqueeze", "transpose", "permute", "t", "expand", "expand_as", "movedim",
    "swapaxes", "stride", "size", "dim", "numel", "item", "numpy", "tolist", "__bool__",
    "is_floating_point", "unflatten", "split", "chunk", "unbind",
}  # fmt: skip
RECEIVES = {"recv", "irecv", "batch_isend_irecv"}

_API = re.compile(r"^(?P<prefix>.+?)\.(?P<name>[^.]+)\.\d+\.(?:forward|backward)\*?$")
_MODULE = re.compile(
    r"^Module\.(?P<path>.+)\.(?P<cls>[^.]+)\.(?P<what>forward|backward|parameters_grad)\.\d+$"
)


def api_name(record: str) -> str:
    """`linear` of Functional.linear.0.forward; "" for what is no API."""
    match = None if record.startswith("Module.") else _API.match(record)
    return match["name"] if match else ""


def module_of(record: str) -> tuple[str, str, str] | None:
    """Path, class and kind of a module's record, None for others."""
    match = _MODULE.match(record)
    return (match["path"], match["cls"], match["what"]) if match else None


def is_communication(record: str) -> bool:
    """Whether other ranks take part in it."""
    return record.startswith(("Distributed.", "NPU.npu_all_gather", "Aten._c10d"))


def rounds(record: str) -> bool:
    """Whether its result may differ in the last digits between machines."""
    if module := module_of(record):
        return module[1] not in EXACT_CLASSES
    return api_name(record) not in EXACT
