"""Escaping of control characters, so that names from files and users cannot control a terminal or a page."""

from __future__ import annotations

import re

CONTROLS = (
    (0x00, 0x1F), (0x7F, 0x9F),  # C0, DEL and C1: terminal escape sequences begin with ESC or CSI
    (0x061C, 0x061C), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F),  # marks of direction, and invisible ones
    (0x2028, 0x2029), (0xD800, 0xDFFF), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB),  # separators of lines, halves of pairs
    (0xE0000, 0xE007F),  # invisible tags
)  # fmt: skip
"""First and last code point of each range of characters that are escaped."""

_RANGES = "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in CONTROLS)
_ALL = re.compile(f"[{_RANGES}]")
_NOT_LAYOUT = re.compile(f"(?![\n\t])[{_RANGES}]")


def escaped(text: str, keep_lines: bool = False) -> str:
    r"""Return the text with control characters escaped; with `keep_lines`, newlines and tabs are kept.

    >>> print(escaped("w\x1b[2J\u202e\n"))
    w\x1b[2J\u202e\x0a
    """
    return (_NOT_LAYOUT if keep_lines else _ALL).sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
