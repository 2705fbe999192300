"""Completion of a captured program: a layout and a mesh for every value, derived from the user's marks.

In reading order:

    random_numbers      random numbers that several stages read: the first stage draws and sends them
    stage_sends         sends between pipeline stages: every operand moves to the mesh of its reader
    layout_completion   layouts of all values: marks are propagated forward and backward to a fixed point
    batch_copies        a copy of a batch input for each mesh that reads it
"""
