"""Programs outside of the process: files, and texts by which processes and ranks compare programs.

In reading order:

    admitted_operators   operators that a program file may name: only functions of tensors and numbers
    encode               program to JSON data
    decode               JSON data to a program; every name is looked up and every number is checked
    program_file         program files: JSON text and constants in one safetensors file, with a checksum
    canonical_text       text of a program that is equal in all processes that capture the same call
    alike_ranks          ranks that can share one program, because their local tensors have equal shapes
"""
