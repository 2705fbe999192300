"""Plans with two phases, training and generation, for a transformer that is described by its sizes.

generation         the sizes of a generation, and the layouts of its model
generation_time    seconds of the prompts' pass and of decode steps
weight_moves       bytes and seconds of the move of weights from the trainer to the sampler
generation_memory  bytes of the fullest rank while a model generates beside the states of training
phase_plan         a plan of both phases as data and as text
phase_search       search for the pair of layouts whose step takes the least time
"""
