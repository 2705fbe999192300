"""Checks and their results, as data.

check    a check, the device that it is given, and the exceptions that it raises
result   results, facts of the machine, and the report of a run
uses     the uses of a machine, from its results
"""
