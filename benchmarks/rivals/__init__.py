"""Comparisons for Meshwright: other libraries, and programs written by hand."""
