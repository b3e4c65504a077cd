"""Arrays in a folder, as Zarr v3. zarr makes their metadata, and this module writes and reads chunks.

By default a chunk is a file of its bytes and their CRC32C. It is written from the memory of the array and read into it,
without copies. So a torn or damaged chunk is an error, and never a wrong number. With a compressor zarr encodes and
decodes chunks. The root's metadata also contain the metadata of all arrays ("consolidated"), so that a reader opens one
file. A rename replaces them at once.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmpi._files import metadata
from jaxmpi._files.chunks import Index, Interval, Region, covering
from jaxmpi._files.dtypes import in_files
from jaxmpi._files.metadata import META

_PIECE = 1 << 20
"""Bytes of which a checksum is computed before other threads may run. As many are read at once."""
_PLAIN = ({"name": "bytes"}, {"name": "bytes", "configuration": {"endian": "little"}})


def need(operation: str) -> Any:
    """Return the module zarr. Raise ImportError if it is not installed, or too old."""
    try:
        import google_crc32c  # noqa: F401
        import zarr.abc.codec  # zarr 2 lacks it
    except ImportError as error:
        advice = "pip install 'zarr>=3', with Python 3.11 or newer"
        raise ImportError(f"{operation}: files need zarr 3 or newer: {advice} ({error})") from error
    return zarr


def codecs(compressor: Any, operation: str) -> tuple[Any, ...]:
    """Return the codecs behind the one that makes bytes. Raise ValueError or TypeError if it is no compressor."""
    zarr = need(operation)
    from zarr.codecs import Crc32cCodec, ZstdCodec

    if compressor is None:
        return (Crc32cCodec(),)
    if isinstance(compressor, str) and compressor == "zstd":
        return ZstdCodec(level=1), Crc32cCodec()
    if not isinstance(compressor, zarr.abc.codec.BytesBytesCodec):
        raise (ValueError if isinstance(compressor, str) else TypeError)(
            f'{operation}: compressor is {compressor!r:.80}: pass None, "zstd", or a codec such as '
            "zarr.codecs.BloscCodec()."
        )
    return compressor, Crc32cCodec()


# --- metadata ---------------------------------------------------------------------------------------------------------


def entry(shape: Any, chunks: Any, dtype: np.dtype, dims: tuple[str, ...], attributes: Any) -> dict[str, Any]:
    fill = np.nan if dtype.kind in "fc" else 0  # other programs read it for a missing chunk
    named = {"dimension_names": dims, "attributes": attributes, "fill_value": fill}
    return {"shape": shape, "chunks": chunks, "dtype": dtype, **named}


def make(folder: Path, entries: Mapping[str, Mapping[str, Any]], compressors: tuple[Any, ...]) -> dict[str, Any]:
    """Make arrays in a folder, without values, and return the metadata of each for `finish`."""
    zarr = need("make")
    from zarr.storage import LocalStore

    metas = {}
    for name, options in entries.items():
        there = LocalStore(folder / name)  # a name with "::" would be a URL
        zarr.create_array(there, **options, compressors=compressors, zarr_format=3)
        metas[name] = json.loads((folder / name / META).read_bytes())
    return metas


def finish(folder: Path, arrays: Mapping[str, Any], attributes: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Write the metadata of the group with the metadata of all arrays, at once: a reader sees the old or the new."""
    replace(folder / META, metadata.encode(arrays, attributes, text))


def replace(path: Path, data: bytes) -> None:
    passing = path.with_name(f".{path.name}.partial")
    passing.write_bytes(data)
    os.replace(passing, path)


# --- chunks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """An array as the metadata describe it."""

    path: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    plain: bool
    """Whether chunks are bytes and their checksum."""
    meta: Mapping[str, Any]
    sums: np.ndarray | None = None
    """The checksum of each chunk, in the order of their indices, if the root has them."""

    @staticmethod
    def from_meta(path: Path, meta: Mapping[str, Any], sums: np.ndarray | None = None) -> "Stored":
        """Read metadata. Raise KeyError, TypeError or ValueError if they are not possible here."""
        encoding = meta["chunk_key_encoding"]
        separator = encoding.get("configuration", {}).get("separator", "/")
        if meta["chunk_grid"]["name"] != "regular" or (encoding["name"], separator) != ("default", "/"):
            raise ValueError("chunks of another form than jaxmpi.io writes")
        chunks = tuple(map(int, meta["chunk_grid"]["configuration"]["chunk_shape"]))
        listed = meta["codecs"]
        plain = len(listed) == 2 and listed[0] in _PLAIN and listed[1]["name"] == "crc32c"
        shape = tuple(map(int, meta["shape"]))
        if len(chunks) != len(shape) or min((*chunks, 1)) < 1 or min((*shape, 0)) < 0:
            raise ValueError(f"shape {shape} and chunks {chunks}")
        stored = Stored(path, shape, chunks, in_files(np.dtype(meta["data_type"])), plain, meta, sums)
        if sums is not None and len(sums) != math.prod(stored.counts):
            raise ValueError(f"{len(sums)} checksums of {math.prod(stored.counts)} chunks")
        return stored

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))

    def number(self, index: Index) -> int:
        """Return the number of a chunk, in the order of their indices."""
        return int(np.ravel_multi_index(index, self.counts)) if index else 0

    def file(self, index: Index) -> Path:
        return self.path.joinpath("c", *map(str, index))


def write(stored: Stored, region: Region, values: np.ndarray, lead: Index = (), anew: bool = False) -> dict[int, int]:
    """Write the chunks of a region, and return the checksum of each by its number.

    The stored array may have more axes in front than the region. Then `values` have them too, and `lead` is the index
    of the chunk along them. `anew`: others may be reading the chunks. They see the old ones until the new ones are
    complete.
    """
    sums = {}
    zarr = None if stored.plain else need("write")
    for index, _, where in () if region.nothing else covering(region.chunks, region.points):
        whole = (*lead, *index)
        chunk = values[(*(slice(None) for _ in lead), *where)]
        if chunk.shape != stored.chunks:  # at the end of an axis: files have whole chunks
            filled = np.zeros(stored.chunks, values.dtype)
            filled[tuple(slice(0, size) for size in chunk.shape)] = chunk
            chunk = filled
        data = with_checksum(chunk) if zarr is None else _encoded(zarr, stored, index=whole, chunk=chunk)
        write_file(stored.file(whole), data, anew)
        sums[stored.number(whole)] = int(data[-1][-4:].view("<u4")[0])
    return sums


def with_checksum(chunk: np.ndarray) -> list[np.ndarray]:
    """Return the bytes of a chunk, and their checksum."""
    import google_crc32c

    data, checksum = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8), 0
    for piece in _pieces(data):
        checksum = google_crc32c.extend(checksum, piece)
    return [data, np.array([checksum], "<u4").view(np.uint8)]


def _encoded(zarr: Any, stored: Stored, index: Index, chunk: np.ndarray) -> list[np.ndarray]:
    """Return the bytes of a chunk as zarr encodes them, with their checksum at the end."""
    array, memory, name = _in_memory(zarr, stored, index)
    array[...] = chunk
    return [np.frombuffer(memory._store_dict[name].to_bytes(), np.uint8)]


def _in_memory(zarr: Any, stored: Stored, index: Index) -> tuple[Any, Any, str]:
    """Make an array that is one chunk, in memory. Return it, the store, and the name of the chunk in the store."""
    from zarr.core.array_spec import ArrayConfig
    from zarr.storage import MemoryStore, StorePath

    memory, meta = MemoryStore({}), {**stored.meta, "shape": list(stored.chunks)}
    config = ArrayConfig.from_dict({"write_empty_chunks": True})  # also a chunk of zeros is a file
    array = zarr.Array(zarr.AsyncArray(meta, StorePath(memory), config))
    return array, memory, "/".join(("c", *("0" for _ in index)))


def write_file(path: Path, data: Sequence[np.ndarray], anew: bool) -> None:
    target = path.with_name(f".{path.name}.partial") if anew else path
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:  # passes large parts to the system in one call each
        for part in data:
            file.write(part.data)
    if anew:
        os.replace(target, path)


def _pieces(data: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, data.size, _PIECE):
        yield data[start : start + _PIECE]


def read(stored: Stored, points: Sequence[Interval]) -> np.ndarray:
    """Return the values at some points, start and end along each axis. Raise OSError if chunks are missing, damaged, or
    of another array. zarr alone would take zeros for missing ones."""
    values = np.empty([end - start for start, end in points], stored.dtype)
    if values.size == 0:
        return values
    for index, there, here in covering(stored.chunks, points):
        _read_chunk(stored, index, there, values[here] if here else values)
    return values


def _read_chunk(stored: Stored, index: Index, there: tuple[slice, ...], here: np.ndarray) -> None:
    """Read some points of a chunk, directly into the result if the chunk lies there as in the file."""
    path = stored.file(index)
    direct = stored.plain and here.shape == stored.chunks and here.flags.c_contiguous
    chunk = here if direct else np.empty(stored.chunks, stored.dtype)
    try:
        checksum = _read_plain(path, chunk) if stored.plain else _read_encoded(stored, path, index, chunk)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the chunk {path} is missing: the files are not complete, for example because only a part was copied."
        ) from None
    if stored.sums is not None and checksum != stored.sums[stored.number(index)]:
        raise OSError(
            f"the chunk {path} belongs to another array, or to another state: its checksum is not the one here."
        )
    if not direct:
        here[...] = chunk[there]


def _read_plain(path: Path, chunk: np.ndarray) -> int:
    """Read a chunk, and return its checksum. Raise OSError if it does not match the bytes."""
    import google_crc32c

    data, tail = chunk.reshape(-1).view(np.uint8), np.empty(4, np.uint8)
    with open(path, "rb") as file:
        count, checksum = 0, 0
        for piece in _pieces(data):
            count += file.readinto(piece.data)
            checksum = google_crc32c.extend(checksum, piece)
        count += file.readinto(tail.data) + len(file.read(1))
    if count != data.size + 4:
        what = "more" if count > data.size + 4 else str(count)
        raise OSError(f"the chunk {path} is damaged: it has {what} bytes, and must have {data.size + 4}.")
    if int(tail.view("<u4")[0]) != checksum:
        raise OSError(f"the chunk {path} is damaged: its checksum does not match its bytes.")
    return checksum


def _read_encoded(stored: Stored, path: Path, index: Index, chunk: np.ndarray) -> int:
    """Read a chunk that zarr decodes from memory, so that the checked bytes are the decoded ones."""
    from zarr.core.buffer import default_buffer_prototype

    data = path.read_bytes()
    try:
        array, memory, name = _in_memory(need("read"), stored, index)
        memory._store_dict[name] = default_buffer_prototype().buffer.from_bytes(data)
        chunk[...] = array[...]
    except Exception as error:
        raise OSError(f"the chunk {path} is damaged: {error}") from error
    return int.from_bytes(data[-4:], "little")


def root(folder: Path) -> bytes:
    """Return the root's metadata. Raise FileNotFoundError if there are none."""
    with contextlib.suppress(NotADirectoryError):
        return (folder / META).read_bytes()
    raise FileNotFoundError(f"{folder} is a file")
