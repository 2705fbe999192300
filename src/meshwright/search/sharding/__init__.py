"""Exact search for the best sharding of each operator of a captured model, along one axis of ranks.

forms                  forms of a value along one axis, and the collectives between them
operator_options       options that sharding rules allow for an operator
attention_options      options of attention along a sharded sequence: gather or "ulysses"
memory_saving          options that save memory: ZeRO, recomputation, gradient accumulation
program_facts          what the search reads of a program, computed once for all of its problems
conversion_prices      seconds of conversions between forms, and of reducing gradients
memory_model           bytes that a rank holds, by the forms of values
variable_elimination   exact minimum of a sum of tables that share variables
sharding_search        the search: variables, tables, and the best solution within a memory limit
saving_estimates       estimates for memory-saving options, before each is searched
accumulation_check     check that gradients of a loss may be accumulated over pieces of a batch
"""
