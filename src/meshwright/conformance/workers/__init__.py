"""Processes that run checks.

messages     files between the command and its workers
worker       the process that runs checks, one after the other
traces       file and line of errors, hangs and crashes
supervisor   start workers, read their results, and replace workers that hang or die
"""
