"""Division of a captured chain of layers into pipeline stages, with the fastest schedule.

layer_chain         find the chain of repeated layers in a captured model
layer_costs         seconds and bytes of each layer of a chain
schedule_tables     known schedule tables, cached
stage_starts        first layers of stages with one chunk per rank, in the order of lower bounds
batched_step_time   step time and memory of many divisions at once, under one schedule
chunk_starts        search for the first layers of chunks, for several chunks per rank
balance             the division and the schedule that take the least time
"""
