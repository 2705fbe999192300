"""Accounts of plans for a transformer that is described by its sizes: what a plan costs, why, and what changes it.

known_recipes    recipes by which models were trained, and the nearest ones to a plan
assumptions      sentences on overlap, kernels, clock and memory that a price assumes
fewer_ranks      fewer ranks that take hardly longer
changes          changes of a cluster, a program or a batch, with the time that a token then takes
plan_account     account of a plan: time, memory, the bottleneck, and other plans
"""
