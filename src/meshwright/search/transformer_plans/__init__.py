"""Plans for a transformer that is described by its sizes: predicted, compared and chosen.

sizes            `Transformer`: the sizes from which the sizes of operators follow
families         families of models that the sizes describe
layer_config     read experts, narrow projections and windows of layers from a published `config.json`
config           read the sizes from such a file
software         properties of training software that change time and memory
degrees          many plans at once, as one array for each degree
schedule_facts   chunks, places, bubble and memory of each pipeline schedule
layer_shares     number of layers on the ranks of a pipeline
states           parameters of a rank, the ranks that share them, and the bytes of their states
layer_time       seconds of one layer on one rank, without experts
expert_time      seconds of the experts of one layer on one rank
layer_pass       seconds of whole layers: with collectives, the host, and recomputation
peak_memory      bytes of the fullest rank, by kind
predict          seconds of a training step, in closed form
simulated_step   seconds of a training step with a simulated pipeline
candidates       all candidate plans for a number of ranks
nearest_sizes    sizes and choices near those that were asked for which a plan exists or fits
choose           search for the fastest plan that fits into memory
communication    each kind of communication of a plan, with count, bytes and seconds
tensor_layouts   layouts of parameters and activations under a plan
"""
