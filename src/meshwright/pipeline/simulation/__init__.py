"""Times of a table's actions, and tables made from times.

simulator            simulate_schedule: start and end of each action, from the times of actions and messages
batched_simulation   BatchedSimulation: one table, simulated for many sets of times at once
compaction           compacted: actions that run while their rank would wait, if memory allows
list_scheduling      list_schedule: each rank runs the most urgent action that is ready
picture              timelines as text, SVG, or a trace for ui.perfetto.dev
"""
