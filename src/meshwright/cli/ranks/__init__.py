"""Code that each rank of `meshwright run`, `quantize`, `profile` or `doctor` runs.

script        run a user's script as `__main__`, once for each simulated rank
define_once   define the operators of a script once for all simulated ranks
quantize      build, shard, quantize and save a model; perplexity before and after
measure       measure a machine: one rank of `meshwright profile`
self_check    compare a matrix product on two ranks with one device, for `meshwright doctor`
"""
