"""Schedules as tables of actions: their text form, order of execution, memory and checks.

action            Action: one action of a rank, and its text form
schedule          Schedule: the rows of actions of all ranks, and the rank of each chunk
parser            parse_schedule: the schedule that a text describes
execution_order   Walk: a feasible order of all actions, or the actions at which ranks deadlock
transfers         tables with messages added, and tables without the split of the backward pass
weight_versions   updates of asynchronous schedules, and the versions of the weights that each action uses
peak_memory       peaks: memory of a rank along its row
checker           check_schedule: completeness, order, deadlock, weight versions and memory of a table
"""
