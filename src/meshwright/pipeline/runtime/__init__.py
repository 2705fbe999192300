"""Execution of a rank's row of a schedule.

runner           PipelineRun: interpreter of a row, action by action, on the rank's communicator
random_draws     random numbers in the order of one device, for rows in another order
weight_stash     versions of the weights that a rank holds in an asynchronous schedule
weight_updates   StepUpdates: the updates after all microbatches, or after each group of them
"""
