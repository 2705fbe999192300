"""Passes that need less memory.

In reading order:

    recompute       activations recomputed in the backward pass instead of saved
    regather        sharded parameters gathered again for the backward pass instead of kept whole
    early_release   each parameter updated as soon as its gradient is available, which is then freed
    in_place        results written over operands that are not read again; must be the last pass
"""
