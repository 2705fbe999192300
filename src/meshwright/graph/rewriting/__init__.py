"""Rewrite rules, the search for matches, the driver that applies rules, and passes.

In reading order:

    rule_arguments        arguments of a rule, and the notation for their shapes
    rule_trace            trace of a rule's function: the operators that it calls on fake tensors
    node_reader           normalized views of nodes: all arguments, no idle casts, every spelling
    spellings             table of spellings: calls of one operator that equal a call of another operator
    pattern               patterns of rules: the operators that `find` calls, with names for what may differ
    rewrite_rule          `Rewrite` (functions `find` and `put`), and `Rewriter` (a function of a node)
    known_values          values that depend on no input, computed: masks, positions, tables
    pattern_match         backtracking search for a pattern in a program
    match_confirmation    `find` and `put` traced again with exactly the matched arguments
    rewrite_driver        `rewrite`: applies rules to a program until none applies
    rule_check            comparison of both sides of a rule on random tensors, with gradients
    program_pass          `Pass`, and the registries of passes and of their rules
"""
