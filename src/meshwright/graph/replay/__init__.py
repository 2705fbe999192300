"""Replay of a captured program on distributed fake tensors, which records the program of one rank.

In reading order:

    loss_scale        loss scaling for float16 gradients, and the update of the scale
    recorder          `Recorder`, and the programs of a call without and with gradients
    model_piece       a part of a model as two programs: forward saves values, backward reads them
    joined_programs   two programs one after the other; the second reads values of the first
"""
