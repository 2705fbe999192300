"""Tests of sums in a fixed order."""
