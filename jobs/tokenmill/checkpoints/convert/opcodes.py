"""Opcodes of pickle for single values, with which `archive` and `metadata` write objects of classes that are not here.

Source: pickletools in the standard library.
"""

import struct


def write_text(value: str) -> bytes:
    """Return the opcode for a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def write_integer(value: int) -> bytes:
    """Return the opcode for an integer that is not negative."""
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def write_tuple(values: tuple[int, ...]) -> bytes:
    """Return the opcodes for a tuple of integers."""
    return b"(" + b"".join(map(write_integer, values)) + b"t"
