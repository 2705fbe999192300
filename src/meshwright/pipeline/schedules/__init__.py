"""The known pipeline schedules.

flush_schedules         GPipe, 1F1B and eager 1F1B: one chunk per rank, unsplit backward
interleaved             interleaved 1F1B, looped BFS and interleaved zero bubble: several chunks per rank
asynchronous            PipeDream and PipeDream-2BW: weights change while microbatches are in flight
zero_bubble             ZB-H1 and ZB-H2: weight gradients where a rank would wait
zero_bubble_heuristic   ZB-1p and ZB-2p: passes placed by times and memory
v_shaped                ZB-V, V-Half, V-Min: two chunks per rank in a V; Wave: several Vs
bidirectional           Chimera, DualPipe and DualPipe-V: microbatches from both ends
known_schedules         KNOWN_SCHEDULES: the schedules by name, with closed forms of bubble and memory
"""
