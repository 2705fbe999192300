"""Search for the best pipeline schedule of a problem, with a proven lower bound.

problem         `Problem`: ranks, microbatches, placement, times, memory, and the objective
bounds          lower bound on the time of any schedule of a problem
hints           known schedules that a problem allows, from which a search starts
integer_model   the problem in whole numbers, as the solver needs it
cp_sat          run the CP-SAT solver in its own process
cp_sat_worker   the script of the solver's process; it imports no other module of this library
find_schedule   `find_schedule` and `find_placement`: the best schedule that a search finds
"""
