"""Text forms of numbers with units."""

from __future__ import annotations

from math import ceil, floor, log10


def seconds(x: float) -> str:
    """Return seconds as text, with a unit of the right size.

    >>> seconds(0.0123), seconds(2.5), seconds(0.0)
    ('12.3 ms', '2.5 s', '0 s')
    """
    if x == 0 or abs(x) >= 1:
        return f"{x:.4g} s"
    return f"{1e3 * x:.3g} ms" if abs(x) >= 1e-3 else f"{1e6 * x:.3g} µs"


def size(nbytes: float) -> str:
    """Return bytes as text, with a unit of the right size.

    >>> size(512), size(2.5e9)
    ('512 B', '2.5 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.3g} {name}" if abs(nbytes) < 1e3 * unit else f"{nbytes / unit:,.0f} {name}"
    return f"{nbytes:.0f} B"


def share(part: float, whole: float) -> str:
    """Return a part as a percentage of the whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def signed(x: float) -> str:
    """Return a difference in seconds as text, with its sign.

    >>> signed(-0.0123), signed(2.5)
    ('-12.3 ms', '+2.5 s')
    """
    return f"{'+' if x > 0 else ''}{seconds(x)}"


def parameters(number: float) -> str:
    """Return the number of a model's parameters as text.

    >>> parameters(33088.0), parameters(8.03e9), parameters(1.03e12)
    ('33,088 parameters', '8.03 billion parameters', '1.03 trillion parameters')
    """
    if number >= 999.5e9:
        return f"{number / 1e12:.3g} trillion parameters"
    return f"{number / 1e9:.3g} billion parameters" if number >= 1e8 else f"{number:,.0f} parameters"


def count(x: float) -> str:
    """Return a number of things as text, with thousands separated; an average may be fractional."""
    return f"{x:,.0f}" if x == round(x) else f"{x:,.4g}"


def size_rounded_up(nbytes: float) -> str:
    """Return bytes as text with a unit of the right size, rounded up to four digits, so that the text is never too low.

    >>> size_rounded_up(20_052_100.0), size_rounded_up(1.5e9), size_rounded_up(12.0)
    ('20.06 MB', '1.5 GB', '12 bytes')
    """
    size, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if nbytes >= s), (1.0, "bytes"))
    digits = 3 - floor(log10(max(nbytes / size, 1.0)))
    return f"{ceil(nbytes / size * 10**digits - 1e-9) / 10**digits:.10g} {unit}"
