"""The .pt container made without torch, read by torch."""

import io
import zipfile
import zlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rankscope.collector.blobs.container import LARGE_OFFSET, around  # noqa: E402

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)
SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 4), (300,), (70000,)]


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.arange(size, dtype=torch.int64).mul(37).to(torch.uint8)
    if dtype is torch.bool:
        data = data.remainder(2)
    return data.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(dtype: torch.dtype) -> bool:
    """Dtypes with less than a byte an element, of which torch saves none."""
    return "int" in str(dtype) and dtype.itemsize == 1 and str(dtype)[-1] in "1234567"


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not bits(d)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_shape_is_read_back_bit_for_bit(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = sample(dtype, shape)
        data = raw(tensor)
        for offset in (None, LARGE_OFFSET):
            head, tail = around(str(dtype), shape, len(data), zlib.crc32(data), offset)
            loaded = torch.load(io.BytesIO(head + data + tail), weights_only=True)
            assert type(loaded) is torch.Tensor
            assert not loaded.requires_grad
            assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
            assert loaded.is_contiguous()
            assert loaded.untyped_storage().nbytes() == len(data)
            assert raw(loaded) == data


def test_the_archive_is_sound_and_the_data_stands_where_it_was_asked_for() -> None:
    data = bytes(range(256)) * 16
    head, tail = around("torch.float32", (1024,), len(data), zlib.crc32(data), LARGE_OFFSET)
    assert len(head) == LARGE_OFFSET
    with zipfile.ZipFile(io.BytesIO(head + data + tail)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == data
    small, _ = around("torch.float32", (1024,), len(data), zlib.crc32(data))
    assert len(small) % 64 == 0
    assert len(small) < 1024


def test_more_than_4_gib_have_the_large_form(tmp_path: Path) -> None:
    size = (1 << 32) + 64
    path = tmp_path / "large.pt"
    head, tail = around("torch.uint8", (size,), size, 0, LARGE_OFFSET)
    with open(path, "wb") as file:  # a hole: no disk space, no reading of the data
        file.write(head)
        file.seek(LARGE_OFFSET + size)
        file.write(tail)
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("archive/data/0")
        assert (member.file_size, member.compress_size) == (size, size)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (size,)
    assert loaded[-1] == 0


def test_too_many_dimensions_for_the_room_are_refused() -> None:
    shape = (1,) * 3000
    with pytest.raises(ValueError, match="3000 dimensions"):
        around("torch.float32", shape, 4, 0, LARGE_OFFSET)
