"""Checks and their results, as data.

check    a check, the device that it is given, and the exceptions that it raises
result   results, facts of the machine, and the report of a run
latest   the latest results of this machine, in the user's cache folder
uses     the uses of a machine, from its results
"""
