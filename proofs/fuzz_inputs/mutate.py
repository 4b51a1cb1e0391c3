"""Mutations: of bytes, of lines, of JSON and YAML trees, and of the fields of a protobuf message."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import yaml

from proofs.fuzz_inputs.values import ODD_BYTES, VALUES, YAML_VALUES, Pairs, Raw

Mutation = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, rng: random.Random) -> bytes:
    """One to four flipped bits."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(data: bytes, rng: random.Random) -> bytes:
    """One to four bytes, each with any value."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5) if out else 0):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Without the end, or without a piece of the middle."""
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.3 else data[:at] + data[at + rng.randrange(1, 40) :]


def insert(data: bytes, rng: random.Random) -> bytes:
    """With odd bytes, or with a piece of itself a second time."""
    at, piece = rng.randrange(len(data) + 1), rng.choice(ODD_BYTES)
    if rng.random() < 0.4:
        start = rng.randrange(len(data) + 1)
        piece = data[start : start + rng.randrange(1, 60)]
    return data[:at] + piece + data[at:]


def swap(data: bytes, rng: random.Random) -> bytes:
    """Two pieces change places."""
    a, b, c, d = sorted(rng.randrange(len(data) + 1) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


BYTES: tuple[Mutation, ...] = (flip, overwrite, cut, insert, swap)


def of_lines(data: bytes, rng: random.Random) -> bytes:
    """A line is lost, repeated, moved, split, joined, or gets an odd character."""
    lines = data.split(b"\n")
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(6)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(to, lines[at])
    elif how == 2:
        lines[at], lines[to] = lines[to], lines[at]
    elif how == 3:
        lines[at] = lines[at].replace(b" ", b"", 1) if b" " in lines[at] else lines[at] + b" x"
    elif how == 4:
        lines[at] = rng.choice(ODD_BYTES) + lines[at]
    else:
        lines[at] = lines[at] + rng.choice((b" ", b"\r", b"\t", b"\xc2\xa0", b"\x00", b"\x0b", b"\x1c"))
    return b"\n".join(lines)


def parsed(text: str) -> Any:
    """A JSON document with objects as `Pairs`."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs(list(pairs)))


def written(tree: Any) -> str:
    """The document of a tree; nothing is checked."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Pairs):
        return "{" + ", ".join(f"{written(key)}: {written(value)}" for key, value in tree.items) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(written, tree)) + "]"
    return json.dumps(tree, ensure_ascii=isinstance(tree, str) and not _encodes(tree))


def _encodes(text: str) -> bool:
    return re.search("[\ud800-\udfff]", text) is None


def as_yaml(tree: Any) -> str:
    """A tree of sections as a block mapping of block mappings, whose values are in flow style."""
    if not isinstance(tree, Pairs):
        return written(tree)
    out = []
    for section, keys in tree.items:
        block = isinstance(keys, Pairs) and keys.items
        rows = [f"  {_key(k)}: {written(v)}" for k, v in keys.items] if block else []
        out.append("\n".join([f"{_key(section)}:" + ("" if block else f" {written(keys)}"), *rows]))
    return "\n".join(out) + "\n"


def _key(key: Any) -> str:
    return key if isinstance(key, str) and re.fullmatch(r"\w+", key) else written(key)


def change_tree(tree: Any, rng: random.Random, values: tuple[Any, ...]) -> Any:
    """The tree with one change somewhere: another value, another key, a lost, repeated or moved entry."""
    places = list(_places(tree))
    holder, at = rng.choice(places) if places else (None, None)
    if holder is None or rng.random() < 0.01:
        return deepcopy(rng.choice(values))
    how = rng.randrange(10)
    is_object = isinstance(holder, Pairs)
    entries = holder.items if is_object else holder
    key, value = entries[at] if is_object else (None, entries[at])

    def put(new: Any) -> None:
        # A copy, because a tree in two places could come to hold itself.
        entries[at] = (key, deepcopy(new)) if is_object else deepcopy(new)

    if how < 3:
        put(rng.choice(values))
    elif how < 5:
        put(_like(value, rng, values))
    elif how == 5 and is_object:
        entries[at] = (_like(key, rng, values) if rng.random() < 0.9 else deepcopy(rng.choice(values)), value)
    elif how == 6:
        del entries[at]
    elif how == 7:
        entries.insert(rng.randrange(len(entries) + 1), deepcopy(entries[at]))
        if rng.random() < 0.5:
            put(_like(value, rng, values))
    elif how == 8:
        other, there = rng.choice(places)
        row = other.items[there] if isinstance(other, Pairs) else (written(other[there]), other[there])
        put(row[1])
    else:
        put(rng.choice((lambda: [value], lambda: Pairs([("a", value)]), lambda: written(value)))())
    return tree


def _places(node: Any) -> Any:
    entries = node.items if isinstance(node, Pairs) else node if isinstance(node, list) else []
    for at, entry in enumerate(entries):
        yield node, at
        yield from _places(entry[1] if isinstance(node, Pairs) else entry)


def _like(value: Any, rng: random.Random, values: tuple[Any, ...]) -> Any:
    """A value of the same type that is a little different."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, float(value), str(value), value * 10**30)
        )
    if isinstance(value, float):
        return rng.choice((value * 2, -value, value + 1, round(value), str(value), value / 3))
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        odd = rng.choice(("\x00", "\x1b", "\u202e", "\ud800", " ", "é", "x", "_", "\n", "\x85"))
        return rng.choice(
            (value[:at] + value[at + 1 :], value[:at] + odd + value[at:], value.upper(), value.swapcase(),
             value * 2, value[:at], f" {value} ", value * 40)
        )  # fmt: skip
    if isinstance(value, list) and value:
        return rng.choice((value[:-1], value + value[-1:], value[::-1], value * 20))
    return rng.choice(values)


def of_json(data: bytes, rng: random.Random) -> bytes:
    """One to three changes of the tree."""
    tree = parsed(data.decode())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = change_tree(tree, rng, VALUES)
    return written(tree).encode(errors="surrogatepass")


def of_yaml(data: bytes, rng: random.Random) -> bytes:
    """One to three changes of the tree."""
    tree = parsed(json.dumps(yaml.safe_load(data)))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = change_tree(tree, rng, VALUES + YAML_VALUES)
    return as_yaml(tree).encode(errors="surrogatepass")


def of_message(data: bytes, rng: random.Random) -> bytes:
    """One to three changes of the fields of a protobuf message, with all lengths put right."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = _change_message(data, rng, depth=0)
    return data


def _change_message(data: bytes, rng: random.Random, depth: int) -> bytes:
    fields = message_fields(data)
    if not fields:
        return rng.randbytes(rng.randrange(8))
    at = rng.randrange(len(fields))
    if rng.random() < 0.5:  # the last fields hold the settings; the others are all pieces
        at = len(fields) - 1 - rng.randrange(min(4, len(fields)))
    number, wire, value = fields[at]
    how = rng.random()
    if isinstance(value, bytes) and depth < 2 and how < 0.6 and message_fields(value):
        fields[at] = (number, wire, _change_message(value, rng, depth + 1))
    elif how < 0.7:
        fields[at] = (number, wire, _other_field(value, wire, rng))
    elif how < 0.8:
        del fields[at]
    elif how < 0.9:
        fields.insert(rng.randrange(len(fields) + 1), fields[rng.randrange(len(fields))])
    else:
        fields[at] = (rng.randrange(1, 60), wire, value)
    return b"".join(_field_bytes(*field) for field in fields)


def _other_field(value: int | bytes, wire: int, rng: random.Random) -> int | bytes:
    if wire == 2:
        assert isinstance(value, bytes)
        some = (
            b"",
            b"a",
            b"\x00",
            b"a" * 7000,
            b"x" * 300_000,
            "▁".encode() * 300,
            b"\xff",
            b"\x1b[2J",
            "\u202e".encode(),
        )
        return rng.choice((rng.choice(some), rng.choice(BYTES)(value, rng)))
    if wire == 5:
        odd = (
            0.0,
            -0.0,
            1.0,
            float("nan"),
            float("inf"),
            -float("inf"),
            3e38,
            -3e38,
            1e-45,
            rng.uniform(-20, 0),
        )
        return int.from_bytes(struct.pack("<f", rng.choice(odd)), "little")
    return rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1))


def message_fields(data: bytes) -> list[tuple[int, int, int | bytes]]:
    """(number, wire type, value) of the fields of a protobuf message; empty if it is not one."""
    fields: list[tuple[int, int, int | bytes]] = []
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            value: int | bytes
            if wire == 0:
                value, at = _varint(data, at)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
                value, at = int.from_bytes(data[at : at + size], "little"), at + size
            elif wire == 2:
                size, at = _varint(data, at)
                value, at = data[at : at + size], at + size
            else:
                return []
            if at > len(data) or number == 0:
                return []
            fields.append((number, wire, value))
    except IndexError:
        return []
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field_bytes(number: int, wire: int, value: int | bytes) -> bytes:
    tag = _varint_bytes(number << 3 | wire)
    if isinstance(value, bytes):
        return tag + _varint_bytes(len(value)) + value
    if wire == 0:
        return tag + _varint_bytes(value)
    return tag + value.to_bytes(8 if wire == 1 else 4, "little")
