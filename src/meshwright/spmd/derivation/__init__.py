"""Derivation of the sharding choices of a call from its rule.

In reading order:

    pending_sums       conditions under which operands of a linear operator may be pending sums
    sharding_choices   factors that may be sharded, required operands, and results
    call               `OperatorCall`: a call of an operator, bound to its rule
"""
