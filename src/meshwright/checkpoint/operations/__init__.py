"""Save, load, open, verify and convert checkpoints.

folder_lock         hold_folder: lock that lets one job at a time save into a folder
step_folders        one folder per step: find the latest complete one, remove old ones
save                save, Saving: a checkpoint that each rank writes and one rank completes
state_differences   LoadReport: differences between a state and a checkpoint, on all ranks
load                load: fill existing tensors with the slices that each rank holds
open_checkpoint     open_checkpoint, verify: the checkpoint at a path, in any format
convert             convert: write a checkpoint in another format, tensor by tensor
"""
