"""Calibration: observe the inputs of layers, block by block, and choose the numbers of their weights.

batches           calibration batches as calls of a model
one_device        run a distributed model's code with whole weights and plain tensors
ranks             work that ranks share: fixed trees of sums, owners, rows
stages            the blocks of a model that are calibrated one by one
observation       sums over the inputs of layers
smoothing         AWQ and SmoothQuant: factors between a norm, or a layer, and the layers behind it
awq               AWQ: the errors that choices of factors make
gptq              GPTQ: factors, and the rounding of rows
round_kernel      the C++ kernel that rounds a block of columns
finished_stages   the folder of finished stages, from which an interrupted calibration goes on
calibration       observe inputs, choose numbers, stage by stage
"""
