"""Read the texts of Parquet and Arrow files by pyarrow, a few rows at a time.

A file is divided between row groups (Parquet) or record batches (Arrow), which `start` and `end` count. Rows
go to a worker as an Arrow stream of the wanted columns alone, as large strings or lists of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megazero.data_tools.preprocessing.inputs import InputKind, library
from megazero.data_tools.preprocessing.parsing import BadRow, Rows, strings_of
from megazero.errors import DataError

_ROWS = 1024  # rows that are decoded at once
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True)
class TableSlices:
    """The rows of a table in slices of about `step` bytes, as (first row, end, data, whether it fits).

    A row of more than `longest` bytes is a slice of its own, without data. Raises DataError for a damaged
    file, and for one whose columns are not texts.
    """

    path: str
    kind: InputKind
    keys: Sequence[str]
    start: int
    end: int | None
    step: int
    longest: int

    def __iter__(self) -> Iterator[tuple[int, int, bytes, bool]]:
        with _pyarrow(self.path, self.kind) as pa:
            row = 0
            for batch in self._batches(pa):
                for piece in self._slices(pa, batch):
                    fits = len(piece) > 1 or _size(pa, piece) <= self.longest
                    yield row, row + len(piece), _packed(pa, piece) if fits else b"", fits
                    row += len(piece)

    def _batches(self, pa: Any) -> Iterator[Any]:
        file = _open(pa, self.path, self.kind)
        schema = file.schema_arrow if self.kind == "parquet" else file.schema
        leaves = [_leaf(pa, schema, key, self.path) for key in self.keys]
        names = [".".join(path) for path, _ in leaves]
        for batch in _groups(file, self.kind, self.start, self.end, names):
            columns = [_column(pa, batch, path).cast(target) for path, target in leaves]
            yield pa.RecordBatch.from_arrays(columns, list(self.keys))

    def _slices(self, pa: Any, batch: Any) -> Iterator[Any]:
        """Halve rows until they are small enough."""
        if len(batch) > 1 and _size(pa, batch) > self.step:
            middle = len(batch) // 2
            yield from self._slices(pa, batch.slice(0, middle))
            yield from self._slices(pa, batch.slice(middle))
        elif len(batch):
            yield batch


@dataclass(frozen=True)
class TableRows(Rows):
    """Rows of a table, in a record batch of pyarrow."""

    batch: Any
    item: str = "row"

    @classmethod
    def of(cls, data: bytes) -> TableRows:
        """Read the rows that `TableSlices` has packed."""
        (batch,) = library("pyarrow", "pyarrow", "table").ipc.open_stream(data)
        return cls(batch)

    def __len__(self) -> int:
        return len(self.batch)

    def size(self, number: int) -> int:
        return int(self.batch.slice(number, 1).nbytes)

    def first(self, count: int) -> TableRows:
        return TableRows(self.batch.slice(0, count))

    def columns(self, keys: Sequence[str]) -> list[list[str]] | None:
        try:
            return strings_of(self.batch.to_pylist(), keys)
        except UnicodeDecodeError:
            return None

    def row(self, number: int) -> dict[str, Any] | BadRow | None:
        row = {}
        for name in self.batch.schema.names:
            try:
                row[name] = self.batch.column(name)[number].as_py()
            except UnicodeDecodeError as error:
                byte = f"byte 0x{error.object[error.start]:02x} at {error.start + 1} of key `{name}`"
                return BadRow("not UTF-8", f"{byte} is not UTF-8")
        return row


def groups_of(path: str, kind: InputKind) -> int:
    """Count the row groups or record batches of a file. Raises DataError for a damaged file."""
    with _pyarrow(path, kind) as pa:
        file = _open(pa, path, kind)
        if kind == "parquet":
            return int(file.metadata.num_row_groups)
        return int(file.num_record_batches) if kind == "arrow" else sum(1 for _ in file)


def rows_before(path: str, kind: InputKind, group: int) -> int:
    """Count the rows before a row group or record batch."""
    with _pyarrow(path, kind) as pa:
        file = _open(pa, path, kind)
        if kind == "parquet":
            return sum(file.metadata.row_group(number).num_rows for number in range(group))
        return sum(len(batch) for batch in _groups(file, kind, 0, group, []))


def whole_rows(path: str, kind: InputKind) -> Iterator[dict[str, Any]]:
    """Yield all rows, with all of their columns. Raises DataError for a damaged file."""
    with _pyarrow(path, kind) as pa:
        for batch in _groups(_open(pa, path, kind), kind, 0, None, None):
            yield from batch.to_pylist()


def _groups(
    file: Any, kind: InputKind, start: int, end: int | None, names: list[str] | None
) -> Iterator[Any]:
    if kind == "parquet":
        groups = range(start, file.metadata.num_row_groups if end is None else end)
        yield from file.iter_batches(_ROWS, row_groups=groups, columns=names, use_threads=False)
    elif kind == "arrow":
        for number in range(start, file.num_record_batches if end is None else end):
            yield file.get_batch(number)
    else:
        for number, batch in enumerate(file):
            if end is not None and number >= end:
                return
            if number >= start:
                yield batch


def _open(pa: Any, path: str, kind: InputKind) -> Any:
    if kind == "parquet":
        return library("pyarrow.parquet", "pyarrow", path).ParquetFile(path, page_checksum_verification=True)
    source = pa.memory_map(path)
    if kind == "arrow":
        return pa.ipc.open_file(source)
    # A stream that is cut between two batches looks whole without its end mark.
    source.seek(max(0, source.size() - len(_END_OF_STREAM)))
    if source.read() != _END_OF_STREAM:
        raise pa.ArrowInvalid("it has no end mark")
    source.seek(0)
    return pa.ipc.open_stream(source)


@contextmanager
def _pyarrow(path: str, kind: InputKind) -> Iterator[Any]:
    """Yield the library, and turn its errors into DataErrors that name the file."""
    pa = library("pyarrow", "pyarrow", path)
    library("pyarrow.compute", "pyarrow", path)
    try:
        yield pa
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"`{path}` must be a whole {'Parquet' if kind == 'parquet' else 'Arrow'} file, but is damaged "
            f"({str(error).splitlines()[0]}); fetch it again."
        ) from error


def _leaf(pa: Any, schema: Any, key: str, path: str) -> tuple[list[str], Any]:
    """The names that lead to a column, and the type that its texts get. DataError unless they are texts."""
    names = [key] if key in schema.names else key.split(".")
    inside, kind = list(schema), pa.null()
    for name in names:
        fields = {field.name: field.type for field in inside}
        if name not in fields:
            have = ", ".join([field.name for field in schema][:8]) or "none"
            raise DataError(
                f"`--json-keys` must name columns of {path}, but `{key}` is none (columns: {have}); correct "
                "the key."
            )
        kind = fields[name]
        inside = list(kind) if pa.types.is_struct(kind) else []
    text, is_list = pa.large_string(), False
    leaf = kind
    if pa.types.is_list(leaf) or pa.types.is_large_list(leaf):
        leaf, is_list = leaf.value_type, True
    if pa.types.is_dictionary(leaf):
        leaf = leaf.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(test(leaf) for test in tests):
        raise DataError(
            f"`{key}` of {path} must be a column of strings or of lists of strings, but is {kind}; name "
            "another by `--json-keys`."
        )
    return names, pa.large_list(text) if is_list else text


def _column(pa: Any, batch: Any, path: Sequence[str]) -> Any:
    column = batch.column(path[0])
    for name in path[1:]:
        column = pa.compute.struct_field(column, name)
    return column


def _size(pa: Any, batch: Any) -> int:
    """The bytes of all texts."""
    total = 0
    for column in batch.columns:
        texts = column.flatten() if pa.types.is_large_list(column.type) else column
        total += pa.compute.sum(pa.compute.binary_length(texts)).as_py() or 0
    return total


def _packed(pa: Any, batch: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data
