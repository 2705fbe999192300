"""The plan of a call: layouts, conversions of operands, and requirements on results.

layout_decision       decide: layouts of a call with the least traffic
attention_algorithm   the chosen algorithm for attention along a sharded sequence: gather, ring or ulysses
local_call            LocalCall: a rank's view of its call, for local forms of operators
operand_reads         local forms whose recorded programs read every operand on every rank
call_plan             plan_call: the conversions, the operator and the result specs of a captured call
result_checks         ResultRequirements: checks of shape, memory format and aliases of local results
decision_record       CallRecord, decisions: the record of a thread's calls for `explain`
"""
