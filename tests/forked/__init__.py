"""Programs of tests as forks of one process that has imported torch: the import takes 3 processor seconds.

Modules:
    popen    fixture `forked_processes`, in which `subprocess` forks Python programs
    server   process that imports torch once, and forks for each program
"""
