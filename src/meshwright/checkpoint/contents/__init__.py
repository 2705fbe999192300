"""Tensors of a checkpoint, their parts, and the ranks that hold them.

index_runs     elements of a tensor that a rank holds, and intersections of two parts
part_writers   distinct parts of tensors, and the rank that writes each part
catalogue      Catalogue: tensors by name, each in pieces in files, and values
rank_world     World: the ranks that save or load together, and their communication
"""
