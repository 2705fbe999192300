"""Uniform random numbers that depend on nothing but four integers: seed, prompt, sample and step.

A generator would give the next number to whoever asks next, so tokens would change with the mesh and with the other
prompts of a batch. Here each number is computed from its integers by the mixing function of SplitMix64 (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, prompt: int, sample: int, step: int) -> float:
    """Return a number in [0, 1) with 53 random bits.

    >>> uniform(0, 0, 0, 0) == uniform(0, 0, 0, 0), uniform(0, 0, 0, 0) == uniform(0, 0, 0, 1)
    (True, False)
    """
    state = 0
    for number in (seed, prompt, sample, step):
        state = _mixed((state ^ (int(number) & _MASK)) + _GOLDEN & _MASK)
    return (state >> 11) * 2.0**-53


def _mixed(z: int) -> int:
    """Return 64 bits of which each depends on all bits of `z`."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
