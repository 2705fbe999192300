"""The checks: a table of named functions for each level.

comparison          comparison with the right results
device              level 0: copies, streams, random generators, memory
operators           level 1: every operator that has a rule, against the CPU
transport           level 3: collectives and messages between two ranks
simulated           level 2: simulated ranks, with the numbers of one device
training_programs   small models with each kind of parallelism
training            level 4: training, checkpoints and exact resumption
speed               level 5: measured speeds
level_table         all checks, by level
"""
